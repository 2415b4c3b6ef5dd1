//! cuDNN's recurrent networks: their descriptors, and the layout of the packed weights, into which PyTorch
//! makes views. [`rnn_memory`](super::rnn_memory) computes the sizes.
//!
//! The layout is the documented one: all matrices, layer by layer and direction by direction, then all
//! biases. The size of the buffer shows that nothing is between them.

use std::ffi::c_int;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use cudarc::cudnn::sys::{
    cudnnDataType_t, cudnnDirectionMode_t, cudnnRNNAlgo_t, cudnnRNNDataLayout_t, cudnnStatus_t,
};

use crate::core::call_table::{answers, by_contract};
use crate::core::ffi::{Destroyed, Handle, In, OK, Out, Status, Word, codes};
use crate::core::host_state::host_state;
use crate::core::lock::lock;
use crate::cuda::reach::{Holder, hold};
use crate::libs::rnn_memory::{RnnShape, SequenceShape};

codes!(cudnnRNNAlgo_t { CUDNN_RNN_ALGO_STANDARD });
codes!(cudnnRNNDataLayout_t { CUDNN_RNN_DATA_LAYOUT_SEQ_MAJOR_PACKED });
codes!(cudnnDirectionMode_t { CUDNN_UNIDIRECTIONAL });
codes!(cudnnDataType_t {
    CUDNN_DATA_DOUBLE,
    CUDNN_DATA_HALF,
    CUDNN_DATA_INT8,
    CUDNN_DATA_UINT8,
    CUDNN_DATA_BFLOAT16,
    CUDNN_DATA_INT64,
    CUDNN_DATA_BOOLEAN,
    CUDNN_DATA_FP8_E4M3,
    CUDNN_DATA_FP8_E5M2,
});

/// The flag of a network that takes padded sequences (`CUDNN_RNN_PADDED_IO_ENABLED`).
const PADDED_IO_ENABLED: u32 = 1;

/// The status of a call with a null descriptor.
const NOT_INITIALIZED: Status = cudnnStatus_t::CUDNN_STATUS_NOT_INITIALIZED as Status;
const BAD_PARAM: Status = cudnnStatus_t::CUDNN_STATUS_BAD_PARAM as Status;

/// The maximum number of dimensions of a tensor (`CUDNN_DIM_MAX`).
const MAX_RANK: usize = 8;

/// The shape of a tensor.
#[derive(Debug, Clone, Copy, Default)]
struct TensorShape {
    /// The type of the elements, a `cudnnDataType_t`.
    data_type: c_int,
    rank: usize,
    sizes: [c_int; MAX_RANK],
    strides: [c_int; MAX_RANK],
}

/// A descriptor of a network, of sequences, of a tensor or of dropout. Only the fields of its own type are
/// used.
#[derive(Default)]
struct Descriptor {
    network: Mutex<RnnShape>,
    sequences: Mutex<SequenceShape>,
    tensor: Mutex<TensorShape>,
    /// Whether the probability of dropout is above 0.
    has_dropout: AtomicBool,
    /// True from the destruction of the descriptor until the next creation reuses it.
    destroyed: AtomicBool,
}

impl Descriptor {
    /// Resets the descriptor to the state of a new one.
    fn reset(&self) {
        *lock(&self.network) = RnnShape::default();
        *lock(&self.sequences) = SequenceShape::default();
        *lock(&self.tensor) = TensorShape::default();
        self.has_dropout.store(false, Relaxed);
        self.destroyed.store(false, Relaxed);
    }
}

/// Returns the bytes of one element of a `cudnnDataType_t`.
fn width(data_type: c_int) -> usize {
    match data_type {
        CUDNN_DATA_DOUBLE | CUDNN_DATA_INT64 => 8,
        CUDNN_DATA_HALF | CUDNN_DATA_BFLOAT16 => 2,
        CUDNN_DATA_INT8 | CUDNN_DATA_UINT8 | CUDNN_DATA_BOOLEAN | CUDNN_DATA_FP8_E4M3
        | CUDNN_DATA_FP8_E5M2 => 1,
        _ => 4,
    }
}

/// The destroyed descriptors. They are reused, because PyTorch makes several for each
/// call of a recurrent network.
static DESTROYED: Destroyed<Descriptor> = Destroyed::none();

fn create(out: Out<Handle<Descriptor>>) -> Status {
    if out.is_null() {
        return BAD_PARAM;
    }
    let Some((handle, descriptor)) = DESTROYED.take() else {
        return out.give(Handle::new(Descriptor::default()));
    };
    descriptor.reset();
    out.give(handle)
}

fn destroy(handle: Handle<Descriptor>) -> Status {
    let Some(descriptor) = handle.get() else { return OK };
    // Destroying a descriptor again succeeds, too, and changes nothing.
    DESTROYED.add(handle, &descriptor.destroyed);
    OK
}

/// Sets the shape of sequences.
///
/// # Safety
/// `lengths` is null or has an element for each sequence of the batch.
unsafe fn set_sequences(
    descriptor: Handle<Descriptor>,
    layout: c_int,
    steps: c_int,
    batch: c_int,
    lengths: In<c_int>,
) -> Status {
    let Some(descriptor) = descriptor.get() else { return NOT_INITIALIZED };
    let (steps, batch) = (steps.max(0) as usize, batch.max(0) as usize);
    let elements = if layout == CUDNN_RNN_DATA_LAYOUT_SEQ_MAJOR_PACKED {
        // SAFETY: sequence < batch.
        let length = |sequence| unsafe { lengths.at(sequence) }.get().unwrap_or(0).max(0) as usize;
        (0..batch).map(length).sum()
    } else {
        steps * batch
    };
    *lock(&descriptor.sequences) = SequenceShape { steps, batch, elements };
    OK
}

/// Sets the probability of dropout and the address of the generator's state, which later calls advance.
fn set_dropout(descriptor: Handle<Descriptor>, probability: f32, states: Word) -> Status {
    hold(Holder::Libraries, states);
    if let Some(descriptor) = descriptor.get() {
        descriptor.has_dropout.store(probability > 0.0, Relaxed);
    }
    OK
}

/// Sets a descriptor to a contiguous tensor of three dimensions.
fn set_contiguous(descriptor: Handle<Descriptor>, data_type: c_int, sizes: [usize; 3]) {
    if let Some(descriptor) = descriptor.get() {
        let mut tensor = TensorShape { data_type, rank: 3, ..TensorShape::default() };
        let mut stride = 1;
        for axis in (0..3).rev() {
            tensor.sizes[axis] = sizes[axis] as c_int;
            tensor.strides[axis] = stride;
            stride *= sizes[axis].max(1) as c_int;
        }
        *lock(&descriptor.tensor) = tensor;
    }
}

/// Reads the sizes or strides of a tensor.
///
/// # Safety
/// `list` is null or has `count` elements.
unsafe fn read_dimensions(list: In<c_int>, count: usize) -> [c_int; MAX_RANK] {
    std::array::from_fn(|axis| {
        // SAFETY: axis < count.
        if axis < count { unsafe { list.at(axis) }.get().unwrap_or(1) } else { 0 }
    })
}

/// Sets the shape of a tensor.
///
/// # Safety
/// Both lists are null or have `rank` elements.
unsafe fn set_tensor(
    descriptor: Handle<Descriptor>,
    data_type: c_int,
    rank: c_int,
    sizes: In<c_int>,
    strides: In<c_int>,
) -> Status {
    let Some(descriptor) = descriptor.get() else { return NOT_INITIALIZED };
    let rank = rank.clamp(0, MAX_RANK as c_int) as usize;
    // SAFETY: the caller's promise.
    let (sizes, strides) = unsafe { (read_dimensions(sizes, rank), read_dimensions(strides, rank)) };
    *lock(&descriptor.tensor) = TensorShape { data_type, rank, sizes, strides };
    OK
}

/// The out-parameters of `cudnnGetTensorNdDescriptor`.
#[derive(Clone, Copy)]
struct TensorOut<'call> {
    data_type: Out<'call, c_int>,
    rank: Out<'call, c_int>,
    sizes: Out<'call, c_int>,
    strides: Out<'call, c_int>,
}

/// Writes the shape of a tensor.
///
/// # Safety
/// Both lists are null or have `capacity` elements.
unsafe fn get_tensor(descriptor: Handle<Descriptor>, capacity: c_int, out: TensorOut) -> Status {
    let Some(descriptor) = descriptor.get() else { return NOT_INITIALIZED };
    let tensor = *lock(&descriptor.tensor);
    out.data_type.put(tensor.data_type);
    out.rank.put(tensor.rank as c_int);
    for axis in 0..tensor.rank.min(capacity.max(0) as usize) {
        // SAFETY: axis < capacity.
        unsafe {
            out.sizes.at(axis).put(tensor.sizes[axis]);
            out.strides.at(axis).put(tensor.strides[axis]);
        }
    }
    OK
}

/// A tensor of batches and places in which the channels of a place are neighbours.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChannelsLast {
    pub(crate) places: usize,
    pub(crate) channels: usize,
    /// The bytes of an element.
    pub(crate) width: usize,
}

/// Returns the shape of the tensor at this address, or `None` if its channels are not neighbours.
///
/// # Safety
/// `descriptor` is null or a tensor descriptor.
pub(crate) unsafe fn channels_last(descriptor: Word) -> Option<ChannelsLast> {
    // SAFETY: the caller's promise.
    let descriptor = unsafe { Handle::<Descriptor>::from_address(descriptor) }.get()?;
    let tensor = *lock(&descriptor.tensor);
    let (sizes, strides) = (tensor.sizes.get(..tensor.rank)?, tensor.strides.get(..tensor.rank)?);
    let (&[batch, channels, ref places @ ..], &[_, 1, ..]) = (sizes, strides) else { return None };
    let size = |size: c_int| size.max(0) as usize;
    Some(ChannelsLast {
        places: places.iter().fold(size(batch), |places, &next| places * size(next)),
        channels: size(channels),
        width: width(tensor.data_type),
    })
}

answers! {
    Real fn {
        cudnnCreateRNNDescriptor, cudnnCreateRNNDataDescriptor, cudnnCreateTensorDescriptor,
        cudnnCreateDropoutDescriptor,
    }(out: Out<Handle<Descriptor>>) { create(out) }
    Real fn {
        cudnnDestroyRNNDescriptor, cudnnDestroyRNNDataDescriptor, cudnnDestroyTensorDescriptor,
        cudnnDestroyDropoutDescriptor,
    }(descriptor: Handle<Descriptor>) { destroy(descriptor) }
    Success fn {cudnnSetDropoutDescriptor, cudnnRestoreDropoutDescriptor}(
        descriptor: Handle<Descriptor>, _handle: Word, probability: f32, states: Word, _size: usize,
        _seed: u64,
    ) {
        set_dropout(descriptor, probability, states)
    }
    Real fn cudnnSetTensorNdDescriptor(
        descriptor: Handle<Descriptor>, data_type: c_int, rank: c_int, sizes: In<c_int>, strides: In<c_int>,
    ) {
        by_contract!(set_tensor(descriptor, data_type, rank, sizes, strides))
    }
    Real fn cudnnGetTensorNdDescriptor(
        descriptor: Handle<Descriptor>, capacity: c_int, data_type: Out<c_int>, rank: Out<c_int>,
        sizes: Out<c_int>, strides: Out<c_int>,
    ) {
        by_contract!(get_tensor(descriptor, capacity, TensorOut { data_type, rank, sizes, strides }))
    }
    Real fn cudnnSetRNNDescriptor_v8(
        descriptor: Handle<Descriptor>, algorithm: c_int, cell: c_int, bias: c_int, direction: c_int,
        _input_mode: c_int, data_type: c_int, _precision: c_int, _math: c_int, input: c_int, hidden: c_int,
        projected: c_int, layers: c_int, dropout: Handle<Descriptor>, flags: u32,
    ) {
        let Some(descriptor) = descriptor.get() else { return NOT_INITIALIZED };
        let size = |value: c_int| value.max(0) as usize;
        *lock(&descriptor.network) = RnnShape {
            cell,
            bias: bias != 0,
            directions: if direction == CUDNN_UNIDIRECTIONAL { 1 } else { 2 },
            data_type,
            width: width(data_type),
            input: size(input),
            hidden: size(hidden),
            projected: size(projected),
            layers: size(layers),
            // With bfloat16, cuDNN's sizes are always the sizes of the standard algorithm.
            is_persistent: algorithm != CUDNN_RNN_ALGO_STANDARD && data_type != CUDNN_DATA_BFLOAT16,
            has_dropout: dropout.get().is_some_and(|dropout| dropout.has_dropout.load(Relaxed)),
            has_padded_io: flags & PADDED_IO_ENABLED != 0,
        };
        OK
    }
    Real fn cudnnSetRNNDataDescriptor(
        descriptor: Handle<Descriptor>, _data_type: c_int, layout: c_int, steps: c_int, batch: c_int,
        _vector: c_int, lengths: In<c_int>, _fill: Word,
    ) {
        by_contract!(set_sequences(descriptor, layout, steps, batch, lengths))
    }
    Real fn cudnnGetRNNWeightSpaceSize(_handle: Word, network: Handle<Descriptor>, size: Out<usize>) {
        let Some(network) = network.get() else { return NOT_INITIALIZED };
        size.give(lock(&network.network).weight_bytes())
    }
    Guess fn cudnnGetRNNWeightParams(
        _handle: Word, network: Handle<Descriptor>, pseudo_layer: c_int, _size: usize, weights: Word,
        linear: c_int, matrix: Handle<Descriptor>, matrix_at: Out<usize>, bias: Handle<Descriptor>,
        bias_at: Out<usize>,
    ) {
        let Some(network) = network.get() else { return NOT_INITIALIZED };
        let shape = *lock(&network.network);
        let (layer, linear) = (pseudo_layer.max(0) as usize, linear.max(0) as usize);
        let (rows, columns) = shape.matrix(layer, linear);
        set_contiguous(matrix, shape.data_type, [1, rows, columns]);
        let at = weights + shape.elements_before(layer, linear) * shape.width;
        matrix_at.put(if rows * columns > 0 { at } else { 0 });
        set_contiguous(bias, shape.data_type, [1, shape.hidden, 1]);
        let index = layer * 2 * shape.gates() + linear;
        let at = weights + (shape.matrix_elements() + index * shape.hidden) * shape.width;
        bias_at.put(if shape.bias && linear < 2 * shape.gates() { at } else { 0 });
        OK
    }
    Guess fn cudnnGetRNNTempSpaceSizes(
        _handle: Word, network: Handle<Descriptor>, training: c_int, data: Handle<Descriptor>,
        workspace: Out<usize>, reserve: Out<usize>,
    ) {
        let (Some(network), Some(data)) = (network.get(), data.get()) else { return NOT_INITIALIZED };
        let (shape, sequences) = (*lock(&network.network), *lock(&data.sequences));
        workspace.put(shape.workspace_bytes(sequences, training != 0));
        reserve.put(if training == 0 { 0 } else { shape.reserve_bytes(sequences) });
        OK
    }
    /// Writes the size of one generator's state for 1,024 threads of each multiprocessor, as an H200 does.
    Guess fn cudnnDropoutGetStatesSize(_handle: Word, size: Out<usize>) {
        size.give(host_state().spec.sms as usize * 1024 * 48)
    }
}
