//! The workspaces of cuDNN's batch norms.
//!
//! The formulas come from the 12 different batch norms of a ResNet-50 in channels last on an H200, in 16 and
//! in 32 bits, and give each of its 36 workspaces to the byte. PyTorch computes batch norms in the other
//! layout without cuDNN.

use crate::core::call_table::{answers, by_contract};
use crate::core::ffi::{Out, Word};
use crate::libs::rnn::{ChannelsLast, channels_last};

/// The channels that one thread block reduces, and the bytes of its two sums of each.
const CHANNELS: usize = 64;
const SUMS: usize = 2 * size_of::<f32>();
const COUNTER: usize = size_of::<u32>();

/// Returns the workspace of the forward pass in bytes.
fn forward(ChannelsLast { places, channels, width }: ChannelsLast) -> usize {
    let parts = places.div_ceil(if width < 4 { 160 } else { 64 });
    let columns = channels.div_ceil(CHANNELS);
    columns * (parts * (CHANNELS * SUMS + COUNTER) + COUNTER) + 1072
}

/// Returns the workspace of the backward pass in bytes.
fn backward(ChannelsLast { places, channels, .. }: ChannelsLast) -> usize {
    let columns = channels.div_ceil(CHANNELS);
    columns * (places.div_ceil(96) * CHANNELS * SUMS + COUNTER) + 1056
}

answers! {
    Guess fn cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
        _handle: Word, _mode: Word, _ops: Word, x: Word, _z: Word, _y: Word, _parameters: Word,
        _activation: Word, size: Out<usize>,
    ) {
        size.give(by_contract!(channels_last(x)).map_or(0, forward))
    }
    Guess fn cudnnGetBatchNormalizationBackwardExWorkspaceSize(
        _handle: Word, _mode: Word, _ops: Word, x: Word, _y: Word, _dy: Word, _dz: Word, _dx: Word,
        _parameters: Word, _activation: Word, size: Out<usize>,
    ) {
        size.give(by_contract!(channels_last(x)).map_or(0, backward))
    }
}

#[cfg(test)]
mod tests {
    use super::{ChannelsLast, backward, forward};

    #[test]
    fn the_workspaces_of_an_h200() {
        for (places, channels, of_16_bits, of_32_bits, of_backward) in [
            (401_408, 64, 1_295_720, 3_237_428, 2_142_244),
            (100_352, 128, 649_176, 1_619_256, 1_072_168),
            (25_088, 256, 325_136, 810_176, 537_648),
            (6_272, 1024, 331_376, 810_224, 541_792),
            (1_568, 2048, 166_320, 414_000, 279_712),
        ] {
            let of = |width| ChannelsLast { places, channels, width };
            assert_eq!(forward(of(2)), of_16_bits);
            assert_eq!(forward(of(4)), of_32_bits);
            assert_eq!(backward(of(2)), of_backward);
        }
    }
}
