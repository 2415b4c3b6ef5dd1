//! cuDNN's recurrent networks: the layout of the packed weights, into which PyTorch makes views, and the
//! sizes of the scratch memory.
//!
//! The layout is the documented one: all matrices, layer by layer and direction by direction, then all
//! biases. cuDNN does not document alignment or padding between them. PyTorch only needs the matrices and
//! biases to be disjoint and inside the buffer. The sizes of workspace and reserve space are guesses.

use std::ffi::c_int;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use cudarc::cudnn::sys::{cudnnDataType_t, cudnnDirectionMode_t, cudnnRNNMode_t, cudnnStatus_t};

use crate::core::call_table::{answers, by_contract};
use crate::core::ffi::{Destroyed, Handle, In, OK, Out, Status, Word, codes};
use crate::core::host_state::host_state;
use crate::core::lock::lock;

codes!(cudnnRNNMode_t { CUDNN_LSTM, CUDNN_GRU });
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

/// The status of a call with a null descriptor.
const NOT_INITIALIZED: Status = cudnnStatus_t::CUDNN_STATUS_NOT_INITIALIZED as Status;

/// The maximum number of dimensions of a tensor (`CUDNN_DIM_MAX`).
const MAX_RANK: usize = 8;

/// The shape of a recurrent network.
#[derive(Debug, Clone, Copy, Default)]
struct RnnShape {
    /// The kind of cell, a `cudnnRNNMode_t`.
    cell: c_int,
    bias: bool,
    directions: usize,
    /// The type of the elements, a `cudnnDataType_t`.
    data_type: c_int,
    input: usize,
    hidden: usize,
    /// The size of the recurrent projection, or 0.
    projected: usize,
    layers: usize,
}

/// The shape of a batch of sequences.
#[derive(Debug, Clone, Copy, Default)]
struct SequenceShape {
    steps: usize,
    batch: usize,
}

/// The shape of a tensor.
#[derive(Debug, Clone, Copy, Default)]
struct TensorShape {
    /// The type of the elements, a `cudnnDataType_t`.
    data_type: c_int,
    rank: usize,
    sizes: [c_int; MAX_RANK],
    strides: [c_int; MAX_RANK],
}

/// A descriptor of a network, of sequences or of a tensor. Only the shape of its own type is used.
#[derive(Default)]
struct Descriptor {
    network: Mutex<RnnShape>,
    sequences: Mutex<SequenceShape>,
    tensor: Mutex<TensorShape>,
    /// True from the destruction of the descriptor until the next creation reuses it.
    destroyed: AtomicBool,
}

impl Descriptor {
    /// Resets the descriptor to the state of a new one.
    fn reset(&self) {
        *lock(&self.network) = RnnShape::default();
        *lock(&self.sequences) = SequenceShape::default();
        *lock(&self.tensor) = TensorShape::default();
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

impl RnnShape {
    fn gates(self) -> usize {
        match self.cell {
            CUDNN_LSTM => 4,
            CUDNN_GRU => 3,
            _ => 1,
        }
    }

    /// Returns the size of the output of one direction.
    fn output(self) -> usize {
        if self.projected > 0 { self.projected } else { self.hidden }
    }

    /// Returns the rows and columns of a weight matrix. `linear` is its number in the cell, and
    /// `pseudo_layer` is the number of the layer and direction.
    fn matrix(self, pseudo_layer: usize, linear: usize) -> (usize, usize) {
        let gates = self.gates();
        if linear >= 2 * gates {
            return if self.output() == self.hidden { (0, 0) } else { (self.output(), self.hidden) };
        }
        let columns = match (linear < gates, pseudo_layer / self.directions) {
            (true, 0) => self.input,
            (true, _) => self.output() * self.directions,
            (false, _) => self.output(),
        };
        (self.hidden, columns)
    }

    /// Returns the number of elements of all matrices before this one.
    fn elements_before(self, pseudo_layer: usize, linear: usize) -> usize {
        let of_layer = |layer, count: usize| -> usize {
            (0..count).map(|linear| self.matrix(layer, linear)).map(|(rows, columns)| rows * columns).sum()
        };
        (0..pseudo_layer).map(|layer| of_layer(layer, 2 * self.gates() + 1)).sum::<usize>()
            + of_layer(pseudo_layer, linear)
    }

    /// Returns the number of elements of all matrices.
    fn matrix_elements(self) -> usize {
        self.elements_before(self.layers * self.directions, 0)
    }

    /// Returns the size of the packed buffer in bytes.
    fn weight_bytes(self) -> usize {
        let biases =
            if self.bias { self.layers * self.directions * 2 * self.gates() * self.hidden } else { 0 };
        (self.matrix_elements() + biases) * width(self.data_type)
    }
}

/// The destroyed descriptors. They are reused, because PyTorch makes several for each
/// call of a recurrent network.
static DESTROYED: Destroyed<Descriptor> = Destroyed::none();

fn create(out: Out<Handle<Descriptor>>) -> Status {
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

answers! {
    Real fn cudnnCreateRNNDescriptor(out: Out<Handle<Descriptor>>) { create(out) }
    Real fn cudnnCreateRNNDataDescriptor(out: Out<Handle<Descriptor>>) { create(out) }
    Real fn cudnnCreateTensorDescriptor(out: Out<Handle<Descriptor>>) { create(out) }
    Real fn cudnnDestroyRNNDescriptor(descriptor: Handle<Descriptor>) { destroy(descriptor) }
    Real fn cudnnDestroyRNNDataDescriptor(descriptor: Handle<Descriptor>) { destroy(descriptor) }
    Real fn cudnnDestroyTensorDescriptor(descriptor: Handle<Descriptor>) { destroy(descriptor) }
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
        descriptor: Handle<Descriptor>, _algorithm: c_int, cell: c_int, bias: c_int, direction: c_int,
        _input_mode: c_int, data_type: c_int, _precision: c_int, _math: c_int, input: c_int, hidden: c_int,
        projected: c_int, layers: c_int, _dropout: Word, _flags: u32,
    ) {
        let Some(descriptor) = descriptor.get() else { return NOT_INITIALIZED };
        let size = |value: c_int| value.max(0) as usize;
        *lock(&descriptor.network) = RnnShape {
            cell,
            bias: bias != 0,
            directions: if direction == CUDNN_UNIDIRECTIONAL { 1 } else { 2 },
            data_type,
            input: size(input),
            hidden: size(hidden),
            projected: size(projected),
            layers: size(layers),
        };
        OK
    }
    Real fn cudnnSetRNNDataDescriptor(
        descriptor: Handle<Descriptor>, _data_type: c_int, _layout: c_int, steps: c_int, batch: c_int,
        _vector: c_int, _lengths: Word, _fill: Word,
    ) {
        let Some(descriptor) = descriptor.get() else { return NOT_INITIALIZED };
        *lock(&descriptor.sequences) =
            SequenceShape { steps: steps.max(0) as usize, batch: batch.max(0) as usize };
        OK
    }
    Guess fn cudnnGetRNNWeightSpaceSize(_handle: Word, network: Handle<Descriptor>, size: Out<usize>) {
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
        let at = weights + shape.elements_before(layer, linear) * width(shape.data_type);
        matrix_at.put(if rows * columns > 0 { at } else { 0 });
        set_contiguous(bias, shape.data_type, [1, shape.hidden, 1]);
        let index = layer * 2 * shape.gates() + linear;
        let at = weights + (shape.matrix_elements() + index * shape.hidden) * width(shape.data_type);
        bias_at.put(if shape.bias && linear < 2 * shape.gates() { at } else { 0 });
        OK
    }
    Guess fn cudnnGetRNNTempSpaceSizes(
        _handle: Word, network: Handle<Descriptor>, training: c_int, data: Handle<Descriptor>,
        workspace: Out<usize>, reserve: Out<usize>,
    ) {
        let (Some(network), Some(data)) = (network.get(), data.get()) else { return NOT_INITIALIZED };
        let (shape, sequences) = (*lock(&network.network), *lock(&data.sequences));
        let step = shape.layers * shape.directions * sequences.batch * shape.hidden * width(shape.data_type);
        // The workspace holds the gates of one time step of all layers, twice. In training, the reserve holds
        // the gates, the cell and the output of every time step of all layers for the backward pass.
        workspace.put(step * shape.gates() * 2);
        reserve.put(if training == 0 { 0 } else { step * sequences.steps * (shape.gates() + 2) });
        OK
    }
    /// Writes the size of one generator's state for 1,024 threads of each multiprocessor, as an H200 does.
    Guess fn cudnnDropoutGetStatesSize(_handle: Word, size: Out<usize>) {
        size.give(host_state().spec.sms as usize * 1024 * 48)
    }
}

#[cfg(test)]
mod tests {
    use super::RnnShape;

    #[test]
    fn packed_rnn_weights_have_as_many_elements_as_the_module_has_parameters() {
        // Expected: the parameters of torch.nn.LSTM(64, 128, 2): 4 * 128 * (64 + 128 + 2) + 4 * 128 * (128 +
        // 128 + 2).
        let lstm = RnnShape {
            cell: 2,
            bias: true,
            directions: 1,
            data_type: 0,
            input: 64,
            hidden: 128,
            projected: 0,
            layers: 2,
        };
        assert_eq!(lstm.weight_bytes(), 4 * (4 * 128 * (64 + 128 + 2) + 4 * 128 * (128 + 128 + 2)));
        // Expected: the parameters of torch.nn.GRU(8, 16, bidirectional=True, bias=False).
        let gru = RnnShape {
            cell: 3,
            bias: false,
            directions: 2,
            data_type: 2,
            input: 8,
            hidden: 16,
            projected: 0,
            layers: 1,
        };
        assert_eq!(gru.weight_bytes(), 2 * (2 * 3 * 16 * (8 + 16)));
    }
}
