//! The sizes of the memory that cuDNN needs for a recurrent network.
//!
//! NVIDIA documents no formula. These sums give, to the byte, what cuDNN 9.19 answered on an H200 for 1,312
//! of 1,317 random networks and for each network of 147 ops of PyTorch. The other five are persistent
//! networks with one hidden unit and at most 155 time steps in all sequences: their workspace has up to
//! 4.8 kB more. The 1,317 networks have projections or one hidden unit. Other cards and the type `double`
//! were not measured.

use std::ffi::c_int;

use cudarc::cudnn::sys::cudnnRNNMode_t;

use crate::core::ffi::codes;

codes!(cudnnRNNMode_t { CUDNN_LSTM, CUDNN_GRU });

/// The workspace that each direction of each layer has, whatever its shape.
const DIRECTION_BYTES: usize = 8 << 20;

/// The bytes at the start of a workspace and of a reserve.
const HEADER_BYTES: usize = 256;

/// Each part of a workspace or a reserve starts at a multiple of this.
const ALIGNMENT: usize = 32;

/// The number of time steps that one forward pass of a network of one direction computes at once.
const FORWARD_STEPS: usize = 256;

/// The shape of a recurrent network.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RnnShape {
    /// The kind of cell, a `cudnnRNNMode_t`.
    pub(super) cell: c_int,
    pub(super) bias: bool,
    pub(super) directions: usize,
    /// The type of the elements, a `cudnnDataType_t`.
    pub(super) data_type: c_int,
    /// The bytes of one element.
    pub(super) width: usize,
    pub(super) input: usize,
    pub(super) hidden: usize,
    /// The size of the recurrent projection, or 0.
    pub(super) projected: usize,
    pub(super) layers: usize,
    /// Whether the algorithm keeps the weights on the chip.
    pub(super) is_persistent: bool,
    pub(super) has_dropout: bool,
    /// Whether cuDNN packs padded sequences itself.
    pub(super) has_padded_io: bool,
}

/// The shape of a batch of sequences.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SequenceShape {
    pub(super) steps: usize,
    pub(super) batch: usize,
    /// The number of elements of all sequences, with their padding if the layout has padding.
    pub(super) elements: usize,
}

impl RnnShape {
    pub(super) fn gates(self) -> usize {
        match self.cell {
            CUDNN_LSTM => 4,
            CUDNN_GRU => 3,
            _ => 1,
        }
    }

    /// Returns the size of the output of one direction.
    pub(super) fn output(self) -> usize {
        if self.projected > 0 { self.projected } else { self.hidden }
    }

    /// Returns the rows and columns of a weight matrix. `linear` is its number in the cell, and
    /// `pseudo_layer` is the number of the layer and direction.
    pub(super) fn matrix(self, pseudo_layer: usize, linear: usize) -> (usize, usize) {
        let gates = self.gates();
        if linear >= 2 * gates {
            return if self.has_projection() { (self.output(), self.hidden) } else { (0, 0) };
        }
        let columns = match (linear < gates, pseudo_layer / self.directions) {
            (true, 0) => self.input,
            (true, _) => self.output() * self.directions,
            (false, _) => self.output(),
        };
        (self.hidden, columns)
    }

    /// Returns the number of elements of all matrices before this one.
    pub(super) fn elements_before(self, pseudo_layer: usize, linear: usize) -> usize {
        let of_layer = |layer, count: usize| -> usize {
            (0..count).map(|linear| self.matrix(layer, linear)).map(|(rows, columns)| rows * columns).sum()
        };
        (0..pseudo_layer).map(|layer| of_layer(layer, 2 * self.gates() + 1)).sum::<usize>()
            + of_layer(pseudo_layer, linear)
    }

    /// Returns the number of elements of all matrices.
    pub(super) fn matrix_elements(self) -> usize {
        self.elements_before(self.pseudo_layers(), 0)
    }

    /// Returns the size of the packed buffer in bytes.
    pub(super) fn weight_bytes(self) -> usize {
        let biases = if self.bias { self.pseudo_layers() * 2 * self.gates() * self.hidden } else { 0 };
        (self.matrix_elements() + biases) * self.width
    }

    /// Returns the bytes of the workspace.
    pub(super) fn workspace_bytes(self, sequences: SequenceShape, is_training: bool) -> usize {
        let SequenceShape { batch, elements, .. } = sequences;
        let (gates, networks) = (self.gates(), self.pseudo_layers());
        let is_bidirectional = self.directions == 2;
        // The hidden units of one time step and of all, for one direction.
        let (step, all) = (batch * self.hidden, elements * self.hidden);

        let mut both = HEADER_BYTES + networks * DIRECTION_BYTES + self.part(self.matrix_elements());
        let mut forward = 0;
        let mut backward = self.part(self.directions.pow(2) * elements * self.input.max(self.hidden))
            + self.part(self.backward_steps(sequences) * step);
        if self.has_projection() {
            both += self.part(self.directions * all);
        }
        if self.cell == CUDNN_LSTM {
            both += self.part(2 * networks * step);
        }
        if is_bidirectional || self.is_persistent {
            both += self.part(2 * networks * step);
            forward += self.part(gates * self.directions * all);
        } else {
            forward += self.part(gates * all.min(FORWARD_STEPS * step));
        }
        if is_bidirectional {
            forward += self.part(4 * all);
        } else if self.has_dropout {
            forward += self.part(all);
        }
        if is_bidirectional || !self.is_persistent {
            forward += self.part(if self.is_persistent { 1 } else { gates } * networks * step);
            backward += self.part(networks * step);
        }
        if self.is_persistent {
            forward += self.part(4 * gates * all);
            backward += self.part(8 * all) + self.part(self.saved_gates() * all);
        }
        if self.has_padded_io {
            // Packed copies of the input, the output and the states, and in the backward pass also of their
            // gradients.
            let cells = if self.cell == CUDNN_LSTM { 2 * self.part(networks * step) } else { 0 };
            let copies = self.part(elements * self.input)
                + self.part(elements * self.output() * self.directions)
                + 2 * self.part(networks * batch * self.output())
                + cells;
            both += (8 * batch).next_multiple_of(ALIGNMENT);
            forward += copies;
            backward += 2 * copies;
        }
        both + if is_training { forward.max(backward) } else { forward }
    }

    /// Returns the bytes of the reserve, which keeps values of the forward pass for the backward pass.
    pub(super) fn reserve_bytes(self, sequences: SequenceShape) -> usize {
        let outputs = sequences.elements * self.directions * self.output();
        let all = sequences.elements * self.directions * self.hidden;
        let inner = self.layers.saturating_sub(1);
        let mut bytes =
            HEADER_BYTES + self.part(self.layers * self.saved_gates() * all) + self.part(inner * all);
        if self.cell == CUDNN_LSTM {
            bytes += self.part(self.layers * all);
        }
        if self.has_projection() {
            bytes += self.part(self.layers * all) + self.part(self.layers * outputs);
        }
        if self.has_dropout {
            // One bit for each output that dropout can zero.
            bytes += inner * self.directions * outputs.div_ceil(8).next_multiple_of(ALIGNMENT);
        }
        bytes
    }

    /// Returns the number of layers, counted once for each direction.
    fn pseudo_layers(self) -> usize {
        self.layers * self.directions
    }

    fn has_projection(self) -> bool {
        self.output() != self.hidden
    }

    /// Returns the bytes of a part of a workspace or a reserve.
    fn part(self, elements: usize) -> usize {
        (elements * self.width).next_multiple_of(ALIGNMENT)
    }

    /// Returns how many values the forward pass saves for each hidden unit and time step, without the cell
    /// state.
    fn saved_gates(self) -> usize {
        if self.cell == CUDNN_GRU { 6 } else { self.gates() }
    }

    /// Returns the number of time steps for which the backward pass has gradients in memory at once.
    fn backward_steps(self, SequenceShape { steps, batch, .. }: SequenceShape) -> usize {
        if self.layers == 1 || self.directions == 2 || self.is_persistent {
            return self.directions * steps * self.layers.min(2);
        }
        // The layers work on different chunks of steps at the same time.
        let chunk = match batch {
            0..=1 => 32,
            2..=8 => 16,
            9..=16 => 8,
            _ if steps >= 128 => 8,
            17..=80 => 4,
            _ => 2,
        };
        steps.min(chunk * self.layers + chunk.max(8))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    codes!(cudnnRNNMode_t { CUDNN_RNN_TANH });

    /// Returns a network of elements of `width` bytes, as PyTorch describes it.
    fn network(
        cell: c_int,
        width: usize,
        input: usize,
        hidden: usize,
        layers: usize,
        directions: usize,
    ) -> RnnShape {
        RnnShape {
            cell,
            bias: true,
            directions,
            width,
            input,
            hidden,
            projected: hidden,
            layers,
            has_padded_io: true,
            ..RnnShape::default()
        }
    }

    /// Returns the workspace in training, the workspace in inference, and the reserve.
    fn sizes(shape: RnnShape, steps: usize, batch: usize) -> (usize, usize, usize) {
        let sequences = SequenceShape { steps, batch, elements: steps * batch };
        let workspace = |is_training| shape.workspace_bytes(sequences, is_training);
        (workspace(true), workspace(false), shape.reserve_bytes(sequences))
    }

    #[test]
    fn packed_rnn_weights_have_as_many_elements_as_the_module_has_parameters() {
        // Expected: the parameters of torch.nn.LSTM(64, 128, 2): 4 * 128 * (64 + 128 + 2) + 4 * 128 * (128 +
        // 128 + 2).
        let lstm = network(CUDNN_LSTM, 4, 64, 128, 2, 1);
        assert_eq!(lstm.weight_bytes(), 4 * (4 * 128 * (64 + 128 + 2) + 4 * 128 * (128 + 128 + 2)));
        // Expected: the parameters of torch.nn.GRU(8, 16, bidirectional=True, bias=False).
        let gru = RnnShape { bias: false, ..network(CUDNN_GRU, 2, 8, 16, 1, 2) };
        assert_eq!(gru.weight_bytes(), 2 * (2 * 3 * 16 * (8 + 16)));
    }

    // The sizes below are measured: cuDNN 9.19 on an H200.

    #[test]
    fn sizes_of_standard_networks_are_the_measured_ones() {
        let lstm = network(CUDNN_LSTM, 4, 256, 512, 2, 2);
        assert_eq!(sizes(lstm, 128, 32), (196_084_224, 196_084_224, 184_549_632));
        let lstm = network(CUDNN_LSTM, 2, 512, 512, 1, 1);
        assert_eq!(sizes(lstm, 64, 64), (38_470_400, 38_404_864, 20_971_776));
        let gru = network(CUDNN_GRU, 4, 300, 300, 3, 1);
        assert_eq!(sizes(gru, 35, 20), (36_686_240, 36_206_240, 16_800_256));
        let tanh = network(CUDNN_RNN_TANH, 2, 256, 512, 2, 2);
        assert_eq!(sizes(tanh, 128, 32), (93_716_992, 74_580_480, 25_166_080));
    }

    #[test]
    fn sizes_of_persistent_networks_are_the_measured_ones() {
        let persistent = |shape| RnnShape { is_persistent: true, ..shape };
        let lstm = persistent(network(CUDNN_LSTM, 2, 512, 512, 1, 1));
        assert_eq!(sizes(lstm, 64, 64), (105_382_656, 105_382_656, 20_971_776));
        let gru = persistent(network(CUDNN_GRU, 4, 64, 128, 1, 1));
        assert_eq!(sizes(gru, 50, 16), (16_515_456, 15_475_072, 2_457_856));
        let tanh = persistent(network(CUDNN_RNN_TANH, 4, 40, 320, 4, 2));
        assert_eq!(sizes(tanh, 60, 4).1, 79_333_152);
    }

    #[test]
    fn sizes_of_networks_with_projection_are_the_measured_ones() {
        let lstm = RnnShape { projected: 64, ..network(CUDNN_LSTM, 4, 128, 256, 2, 1) };
        assert_eq!(sizes(lstm, 50, 16).0, 23_208_320);
        let lstm = RnnShape {
            projected: 75,
            has_dropout: true,
            has_padded_io: false,
            ..network(CUDNN_LSTM, 2, 100, 150, 1, 1)
        };
        assert_eq!(sizes(lstm, 800, 40), (40_181_376, 40_181_376, 62_400_256));
    }

    #[test]
    fn sizes_of_layers_that_work_in_chunks_are_the_measured_ones() {
        let lstm = |input, hidden, layers| RnnShape {
            projected: hidden / 2,
            has_padded_io: false,
            ..network(CUDNN_LSTM, 4, input, hidden, layers, 1)
        };
        assert_eq!(sizes(lstm(300, 800, 3), 1024, 1), (65_438_080, 65_057_280, 70_451_456));
        assert_eq!(sizes(lstm(800, 200, 2), 1500, 4), (44_630_272, 28_572_672, 67_200_256));
        assert_eq!(sizes(lstm(128, 32, 2), 32, 32), (17_617_152, 17_576_192, 1_835_264));
    }

    #[test]
    fn sizes_of_layers_with_dropout_are_the_measured_ones() {
        let lstm = RnnShape {
            projected: 40,
            bias: false,
            has_dropout: true,
            ..network(CUDNN_LSTM, 2, 2048, 80, 2, 2)
        };
        assert_eq!(sizes(lstm, 3, 400), (70_252_928, 47_020_928, 5_400_256));
    }
}
