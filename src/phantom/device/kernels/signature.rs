//! The signature of a kernel, which its name and its code reveal: its parameters, and the addresses
//! in them to which it writes.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, RwLock};

use crate::core::addresses;
use crate::core::bytes::contains;
use crate::core::ffi::{Handle, In};
use crate::core::lock::{self, lock};
use crate::cuda::reach::Launch;
use crate::kernels::cubin::Parameter;
use crate::kernels::fatbin::FatBinary;
use crate::kernels::functor;
use crate::kernels::offset_calculator::{REDUCE_OP, aligned_size};
use crate::kernels::parameter_types::{self, Addresses, Type};

/// The maximum number of parameter bytes that CUDA allows (since 12.1; 4096 before).
const MAX_BYTES: usize = 32764;

/// The signature of a kernel.
#[derive(Debug)]
pub(crate) struct Signature {
    /// The parameters, and the properties that their types reveal.
    parameters: Box<[(Parameter, Type)]>,
    outputs: Outputs,
    stores_addresses: bool,
    only_dereferences: bool,
}

/// The addresses in a parameter block to which a kernel writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outputs {
    /// The addresses in all parameters except constants.
    All,
    /// The addresses in the first parameter.
    FirstParameter,
    /// The addresses in all parameters except the first N, where N is the value.
    AllButParameters(usize),
    /// Of the addresses in the last parameter after offset calculators of `offset` bytes: the first of the
    /// `operands` operands, and the addresses after the operands.
    FirstOperand { offset: usize, operands: usize },
    /// Of the addresses in the last parameter after `offset` bytes: all except the first one (the input) and,
    /// if the operation has only one output, the unused slot of the second output.
    AllButFirst { offset: usize, has_one_output: bool },
    /// Of the addresses in the last parameter after offset calculators of `offset` bytes: all except the
    /// indices, which are first, and the source.
    AllButSource { offset: usize },
}

/// Parts of the names of reductions with one output. They leave the slot of the second output unset, so it
/// contains old stack contents. Under a tracer, these are often the address of a block. (The order in ATen's
/// `Reduce.cuh` is: the input, two outputs, the buffers.)
const ONE_OUTPUT: [&[u8]; 10] = [
    b"func_wrapper_t",
    b"MeanOps",
    b"7NormOps",
    b"NormTwoOps",
    b"NormOneOps",
    b"NormZeroOps",
    b"AbsMaxOps",
    b"AbsMinOps",
    b"ArgMaxOps",
    b"ArgMinOps",
];

/// The offset of the source's address after the calculator in scatter and gather. The address follows the
/// indices, the size of the dimension, the functor, the output, a stride and the number of elements (ATen's
/// `ScatterGatherKernel.cu`).
const SCATTER_SOURCE: usize = 48;

impl Outputs {
    /// Returns the outputs of the kernel with this name. The functors of elementwise and index kernels
    /// contain an offset calculator, the address of the output, and the addresses of the inputs. The functors
    /// of scatter and gather have the address of the indices before these. (ATen's `CUDALoops.cuh`,
    /// `IndexKernel.cu`, `Indexing.cu`, `ScatterGatherKernel.cu`, `Shape.cu`.)
    fn from_name(name: &[u8]) -> Self {
        let is_one_of = |parts: &[&[u8]]| has(name, parts);
        if is_one_of(&[b"18elementwise_kernelI"]) {
            return match functor::arity(name) {
                Some(arity) => Self::FirstOperand { offset: aligned_size(arity + 1), operands: arity + 1 },
                None => Self::All,
            };
        }
        if is_one_of(&[b"index_elementwise_kernel"]) && is_one_of(&[b"gpu_index_kernel"]) {
            return Self::FirstOperand { offset: aligned_size(3), operands: usize::MAX };
        }
        if is_one_of(&[b"scatter_gather_elementwise_kernel"]) {
            let operands = if is_one_of(&[b"scatter_fill_internal"]) { 2 } else { 3 };
            return Self::AllButSource { offset: aligned_size(operands) };
        }
        if is_one_of(&[b"6native13reduce_kernel"]) {
            return Self::AllButFirst { offset: REDUCE_OP, has_one_output: is_one_of(&ONE_OUTPUT) };
        }
        // The first parameters of CUB's selections are the input and the flags; the first one of its
        // reductions is the input.
        if is_one_of(&[b"DeviceSelectSweepKernel"]) {
            return Self::AllButParameters(2);
        }
        if is_one_of(&[b"DeviceReduceKernel", b"DeviceReduceSingleTileKernel"]) {
            return Self::AllButParameters(1);
        }
        if is_one_of(&[
            b"vectorized_gather_kernel",
            b"indexSelectSmallIndex",
            b"indexSelectLargeIndex",
            b"CatArrayBatchedCopy",
        ]) {
            return Self::FirstParameter;
        }
        Self::All
    }
}

/// Parts of the names of kernels that store addresses for a later kernel: PyTorch's ranges (a range over
/// addresses is a table for the batched functions of cuBLAS), and kernels that prepare grouped matrix
/// products.
const STORES_ADDRESSES: [&[u8]; 6] =
    [b"arange", b"linspace", b"prepare_grouped_gemm", b"group_gemm_starts", b"pointers", b"_ptrs"];

/// Parts of the names of kernels that load addresses only to copy the memory at them.
const ONLY_DEREFERENCES: [&[u8]; 4] =
    [b"chunk_cat", b"split_with_sizes", b"symmetric_memory", b"all_reduce_kernel"];

fn has(name: &[u8], parts: &[&[u8]]) -> bool {
    parts.iter().any(|part| contains(name, part))
}

impl Signature {
    /// Creates the signature of a kernel with this name and these parameters.
    pub(crate) fn new(name: &[u8], parameters: &[Parameter]) -> Self {
        let types = parameter_types::from_name(name, parameters);
        let parameters: Box<[_]> = parameters.iter().copied().zip(types).collect();
        Self {
            parameters,
            outputs: Outputs::from_name(name),
            stores_addresses: has(name, &STORES_ADDRESSES),
            only_dereferences: has(name, &ONLY_DEREFERENCES),
        }
    }

    /// Returns true if the kernel has no parameters.
    pub(crate) fn is_empty(&self) -> bool {
        self.parameters.is_empty()
    }

    fn launch(&self) -> Launch {
        let mut launch = Launch::default();
        launch.stores_addresses = self.stores_addresses;
        launch.only_dereferences = self.only_dereferences;
        launch
    }

    /// Adds the addresses in the parameter at position `place` to a launch with `blocks` blocks of threads in
    /// the first dimension. `bytes` is the value of the parameter.
    fn add(&self, launch: &mut Launch, bytes: &[u8], place: usize, blocks: u32) {
        const ADDRESS: usize = size_of::<usize>();
        let Type { is_constant, addresses } = self.parameters[place].1;
        let searched = match addresses {
            Addresses::Everywhere => usize::MAX,
            Addresses::First => ADDRESS,
            Addresses::PerBlock => ADDRESS.saturating_mul(blocks as usize),
            Addresses::TensorList(list) => {
                return list.addresses(bytes, blocks, |address| launch.writes(address));
            }
        };
        let bytes = &bytes[..bytes.len().min(searched)];
        let is_last = place + 1 == self.parameters.len();
        let mut first = None;
        addresses::in_parameter(bytes, |address, offset| {
            let writes = match self.outputs {
                Outputs::FirstParameter => place == 0,
                Outputs::AllButParameters(read) => place >= read,
                Outputs::FirstOperand { offset: start, .. }
                | Outputs::AllButFirst { offset: start, .. }
                | Outputs::AllButSource { offset: start }
                    // A pointer is aligned to its size. A value that looks like an address at another offset
                    // is old stack content in an unused slot of a calculator.
                    if is_last && (offset < start || offset % ADDRESS != 0) =>
                {
                    return;
                }
                Outputs::FirstOperand { offset: start, operands } if is_last => {
                    offset < start + ADDRESS
                        || offset >= start.saturating_add(operands.saturating_mul(ADDRESS))
                }
                Outputs::AllButFirst { has_one_output, .. } if is_last => {
                    let input = *first.get_or_insert(offset);
                    if has_one_output && offset == input + 2 * ADDRESS {
                        return;
                    }
                    offset != input
                }
                Outputs::AllButSource { offset: start } if is_last => {
                    offset != start && offset != start + SCATTER_SOURCE
                }
                Outputs::All
                | Outputs::FirstOperand { .. }
                | Outputs::AllButFirst { .. }
                | Outputs::AllButSource { .. } => true,
            };
            if writes && !is_constant {
                launch.writes(address);
            } else {
                launch.reads(address);
            }
        });
    }

    /// Returns the launch with these arguments, or `None` if they cannot be read. `blocks` is the number of
    /// blocks in the first dimension.
    ///
    /// # Safety
    /// `arguments` is the argument list in a launch of this kernel: an array with the address of each
    /// argument.
    pub(crate) unsafe fn launch_with(&self, arguments: In<usize>, blocks: u32) -> Option<Launch> {
        let mut launch = self.launch();
        for (place, (parameter, _)) in self.parameters.iter().enumerate() {
            if parameter.size > MAX_BYTES {
                return None;
            }
            // SAFETY: by the caller's promise, the list has an element for each parameter.
            let address = unsafe { arguments.at(parameter.index) }.get().filter(|&address| address != 0)?;
            // SAFETY: the argument has the size of the parameter.
            let bytes = unsafe { std::slice::from_raw_parts(address as *const u8, parameter.size) };
            self.add(&mut launch, bytes, place, blocks);
        }
        Some(launch)
    }

    /// Returns the launch with this parameter block. `blocks` is the number of blocks in the first dimension.
    pub(crate) fn launch_with_block(&self, block: &[u8], blocks: u32) -> Launch {
        let mut launch = self.launch();
        for (place, (parameter, _)) in self.parameters.iter().enumerate() {
            let end = (parameter.offset + parameter.size).min(block.len());
            let bytes = block.get(parameter.offset..end).unwrap_or_default();
            self.add(&mut launch, bytes, place, blocks);
        }
        launch
    }
}

/// A kernel registered with the runtime: the address of its host stub, and its name.
struct Registered {
    stub: usize,
    binary: Handle<FatBinary>,
    name: usize,
}

/// The registered kernels, and the number of them that are already sorted by stub address.
static REGISTERED: Mutex<(Vec<Registered>, usize)> = Mutex::new((Vec::new(), 0));

/// Registers a kernel with the runtime.
///
/// # Safety
/// `name` is null or a C string that lives as long as the kernel.
pub(crate) unsafe fn register(stub: usize, binary: Handle<FatBinary>, name: usize) {
    lock(&REGISTERED).0.push(Registered { stub, binary, name });
    // The kernel may have the address of a kernel of an unloaded library, whose signature is still cached. So
    // the cached signature is removed.
    let is_launched = lock::read(&SIGNATURES).contains_key(&stub);
    if is_launched {
        lock::write(&SIGNATURES).remove(&stub);
    }
}

type Signatures = HashMap<usize, Option<&'static Signature>, rustc_hash::FxBuildHasher>;

/// The signatures of launched kernels, by the address of the stub or by handle.
static SIGNATURES: LazyLock<RwLock<Signatures>> = LazyLock::new(RwLock::default);

fn insert(kernel: usize, signature: Option<Signature>) -> Option<&'static Signature> {
    let signature = signature.map(|signature| &*Box::leak(Box::new(signature)));
    lock::write(&SIGNATURES).insert(kernel, signature);
    signature
}

/// Sets the signature of a kernel that a program got from a module.
pub(crate) fn set(kernel: usize, signature: Option<Signature>) {
    insert(kernel, signature);
}

/// Returns the signature of a kernel, or `None` if its parameters are not known.
pub(crate) fn for_kernel(kernel: usize) -> Option<&'static Signature> {
    let known = lock::read(&SIGNATURES).get(&kernel).copied();
    known.unwrap_or_else(|| insert(kernel, read(kernel)))
}

/// Reads the signature of a registered kernel from its binary.
fn read(stub: usize) -> Option<Signature> {
    let mut registered = lock(&REGISTERED);
    let (all, sorted) = &mut *registered;
    if *sorted != all.len() {
        // If several kernels were registered with one address, the last one counts.
        all.reverse();
        all.sort_by_key(|kernel| kernel.stub);
        all.dedup_by_key(|kernel| kernel.stub);
        *sorted = all.len();
    }
    let found = all.binary_search_by_key(&stub, |kernel| kernel.stub).ok()?;
    let Registered { binary, name, .. } = all[found];
    drop(registered);
    if name == 0 {
        return None;
    }
    // SAFETY: a C string by the contract of `register`. The kernel is being launched, so its binary is
    // loaded.
    let name = unsafe { std::ffi::CStr::from_ptr(name as *const _) }.to_bytes();
    // SAFETY: as above.
    let parameters = unsafe { binary.get()?.parameters(name) }?;
    Some(Signature::new(name, &parameters))
}
