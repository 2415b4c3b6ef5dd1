//! How many multiprocessors the GPCs of the card have. cuDNN's engines for Hopper and later divide a
//! convolution among the thread block clusters that fit into them, and take workspace for each part.
//!
//! On a card, cuDNN asks how many clusters of 16, 14, ... 2 blocks run at once
//! (`cudaOccupancyMaxActiveClusters`). Without a device it assumes a single GPC of the largest size, and the
//! description of a card has no entry for it.

use std::ffi::{c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};

use crate::core::host_state::host_state;
use crate::core::lock::lock;
use crate::libs::cudnn;
use crate::ops::replaced::Replaced;

/// The versions of cuDNN whose array was written in every convolution of `tests/real_gpu` without a fault.
const CHECKED: std::ops::Range<usize> = 91900..92000;
/// The blocks of the largest cluster. A GPC that has more multiprocessors counts as one of this size, and its
/// other multiprocessors as GPCs of two.
const LARGEST_CLUSTER: c_int = 16;

/// The H200 that was measured, found from the workspaces that its convolutions took: three GPCs of 18
/// multiprocessors, four of 16, one of 14. Which multiprocessors work differs from one chip to the next.
const HOPPER_WITH_132: [c_int; 11] = [16, 16, 16, 16, 16, 16, 16, 14, 2, 2, 2];

/// Returns the sizes of the GPCs of a card with this many multiprocessors, as cuDNN counts them. `largest` is
/// the number of multiprocessors in a whole GPC of this kind of card.
fn gpcs(capability: (u32, u32), multiprocessors: c_int, largest: c_int) -> Vec<c_int> {
    if capability == (9, 0) && multiprocessors == HOPPER_WITH_132.iter().sum::<c_int>() {
        return HOPPER_WITH_132.to_vec();
    }
    let whole = (multiprocessors as u32).div_ceil(largest as u32);
    let (mut sizes, mut rest) = (Vec::new(), multiprocessors);
    while rest > 0 {
        let most = if sizes.len() < whole as usize { largest.min(LARGEST_CLUSTER) } else { 2 };
        sizes.push(most.min(rest));
        rest -= most;
    }
    sizes
}

/// The replaced function.
static REAL: Replaced =
    Replaced::new(c"libcudnn_graph.so.9", c"_ZN8mb_tools11hasValidVSLERKSt5arrayIiLm24EE");

/// Replaces `bool mb_tools::hasValidVSL(std::array<int, 24> const&)` of `libcudnn_graph.so.9`, which the engines call
/// before they read the array. In 9.19 it returns whether the array has a first GPC. Here it also fills in the others
/// with that version. Other versions keep their own function, because it is not known that their array may be written.
#[unsafe(export_name = "_ZN8mb_tools11hasValidVSLERKSt5arrayIiLm24EE")]
extern "C" fn has_gpcs(array: &[AtomicI32; 24]) -> bool {
    if !CHECKED.contains(&cudnn::version()) {
        // SAFETY: the function of this name has this type.
        let real = unsafe {
            std::mem::transmute::<*mut c_void, extern "C" fn(&[AtomicI32; 24]) -> bool>(REAL.real())
        };
        return real(array);
    }
    static FILLED_BY: Mutex<()> = Mutex::new(());
    let _one_at_a_time = lock(&FILLED_BY);
    let largest = array[0].load(Ordering::Relaxed);
    let is_single = array[1].load(Ordering::Relaxed) == 0;
    if largest > 0 && is_single {
        let spec = &host_state().spec;
        for (place, size) in array.iter().zip(gpcs(spec.cc, spec.sms as c_int, largest)) {
            place.store(size, Ordering::Relaxed);
        }
    }
    largest > 0
}

#[cfg(test)]
mod tests {
    use super::gpcs;

    #[test]
    fn all_multiprocessors_are_in_a_gpc() {
        for (capability, multiprocessors, largest) in
            [((9, 0), 132, 18), ((9, 0), 114, 18), ((9, 0), 78, 18), ((10, 0), 148, 20), ((12, 0), 170, 12)]
        {
            let sizes = gpcs(capability, multiprocessors, largest);
            assert_eq!(sizes.iter().sum::<i32>(), multiprocessors);
            assert!(sizes.len() <= 24 && sizes.iter().all(|&size| 0 < size && size <= largest));
        }
    }
}
