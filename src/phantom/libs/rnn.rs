//! cuDNN's recurrent networks: the layout of the packed weights, into which PyTorch makes views,
//! and the sizes of its scratch memory.
//!
//! The layout is the documented one: all matrices, layer by layer and direction by direction, then
//! all biases. Whether cuDNN aligns or pads inside is not documented; PyTorch only needs the parts
//! to be disjoint and inside. The sizes of workspace and reserve space are guesses.

use std::ffi::c_int;
use std::sync::Mutex;

use crate::core::ffi::{INVALID_VALUE, OK, Out, Word, leak};
use crate::core::host_state::{lock, machine};
use crate::table::call_table::answers;

/// What a recurrent network is.
#[derive(Debug, Clone, Copy, Default)]
struct Network {
    /// `cudnnRNNMode_t`: 2 is LSTM, 3 is GRU.
    cell: c_int,
    bias: bool,
    directions: usize,
    data_type: c_int,
    input: usize,
    hidden: usize,
    projected: usize,
    layers: usize,
}

/// What a batch of sequences is.
#[derive(Debug, Clone, Copy, Default)]
struct Data {
    steps: usize,
    batch: usize,
}

/// A tensor descriptor's shape.
#[derive(Debug, Clone, Copy, Default)]
struct Tensor {
    data_type: c_int,
    rank: usize,
    sizes: [c_int; 8],
    strides: [c_int; 8],
}

/// Every object is one of these, whichever it is: PyTorch destroys them in any order.
#[derive(Default)]
struct Object {
    network: Mutex<Network>,
    data: Mutex<Data>,
    tensor: Mutex<Tensor>,
}

fn object(handle: usize) -> Option<&'static Object> {
    // SAFETY: by the C contract a handle is null or came from a create call below; those are leaked.
    unsafe { (handle as *const Object).as_ref() }
}

/// Bytes of one element of a `cudnnDataType_t`.
fn width(data_type: c_int) -> usize {
    match data_type {
        1 | 6 => 8,
        2 | 9 => 2,
        3 | 5 | 7 | 8 | 12 | 13 => 1,
        _ => 4,
    }
}

impl Network {
    fn gates(self) -> usize {
        match self.cell {
            2 => 4,
            3 => 3,
            _ => 1,
        }
    }

    fn output(self) -> usize {
        if self.projected > 0 { self.projected } else { self.hidden }
    }

    /// Rows and columns of one matrix: first the gates' input matrices, then their recurrent
    /// ones, then the projection.
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

    /// Elements of all matrices before that one; with a layer too many, of all.
    fn before(self, pseudo_layer: usize, linear: usize) -> usize {
        let one = |layer, count: usize| -> usize {
            (0..count).map(|linear| self.matrix(layer, linear)).map(|(rows, columns)| rows * columns).sum()
        };
        (0..pseudo_layer).map(|layer| one(layer, 2 * self.gates() + 1)).sum::<usize>()
            + one(pseudo_layer, linear)
    }

    fn matrices(self) -> usize {
        self.before(self.layers * self.directions, 0)
    }

    /// Bytes of the whole packed buffer.
    fn weights(self) -> usize {
        let biases =
            if self.bias { self.layers * self.directions * 2 * self.gates() * self.hidden } else { 0 };
        (self.matrices() + biases) * width(self.data_type)
    }
}

fn describe(handle: usize, data_type: c_int, sizes: [usize; 3]) {
    if let Some(object) = object(handle) {
        let mut tensor = Tensor { data_type, rank: 3, ..Tensor::default() };
        let mut stride = 1;
        for axis in (0..3).rev() {
            tensor.sizes[axis] = sizes[axis] as c_int;
            tensor.strides[axis] = stride;
            stride *= sizes[axis].max(1) as c_int;
        }
        *lock(&object.tensor) = tensor;
    }
}

fn read_ints(list: Out<c_int>, count: usize) -> [c_int; 8] {
    std::array::from_fn(|axis| if axis < count { list.at(axis).get().unwrap_or(1) } else { 0 })
}

answers! {
    Real fn cudnnCreateRNNDescriptor(out: Out<usize>) { out.give(leak(Object::default())) }
    Real fn cudnnCreateRNNDataDescriptor(out: Out<usize>) { out.give(leak(Object::default())) }
    Real fn cudnnCreateTensorDescriptor(out: Out<usize>) { out.give(leak(Object::default())) }
    Success fn cudnnDestroyRNNDescriptor(_handle: Word) { OK }
    Success fn cudnnDestroyRNNDataDescriptor(_handle: Word) { OK }
    Success fn cudnnDestroyTensorDescriptor(_handle: Word) { OK }
    Real fn cudnnSetTensorNdDescriptor(handle: Word, data_type: c_int, rank: c_int, sizes: Out<c_int>, strides: Out<c_int>) {
        let Some(object) = object(handle) else { return INVALID_VALUE };
        let rank = rank.clamp(0, 8) as usize;
        *lock(&object.tensor) = Tensor { data_type, rank, sizes: read_ints(sizes, rank), strides: read_ints(strides, rank) };
        OK
    }
    Real fn cudnnGetTensorNdDescriptor(
        handle: Word, wanted: c_int, data_type: Out<c_int>, rank: Out<c_int>, sizes: Out<c_int>, strides: Out<c_int>,
    ) {
        let Some(object) = object(handle) else { return INVALID_VALUE };
        let tensor = *lock(&object.tensor);
        data_type.put(tensor.data_type);
        rank.put(tensor.rank as c_int);
        for axis in 0..tensor.rank.min(wanted.max(0) as usize) {
            sizes.at(axis).put(tensor.sizes[axis]);
            strides.at(axis).put(tensor.strides[axis]);
        }
        OK
    }
    Real fn cudnnSetRNNDescriptor_v8(
        handle: Word, _algorithm: c_int, cell: c_int, bias: c_int, direction: c_int, _input_mode: c_int,
        data_type: c_int, _precision: c_int, _math: c_int, input: c_int, hidden: c_int, projected: c_int,
        layers: c_int, _dropout: Word, _flags: u32,
    ) {
        let Some(object) = object(handle) else { return INVALID_VALUE };
        let size = |value: c_int| value.max(0) as usize;
        *lock(&object.network) = Network {
            cell,
            bias: bias != 0,
            directions: if direction == 0 { 1 } else { 2 },
            data_type,
            input: size(input),
            hidden: size(hidden),
            projected: size(projected),
            layers: size(layers),
        };
        OK
    }
    Real fn cudnnSetRNNDataDescriptor(
        handle: Word, _data_type: c_int, _layout: c_int, steps: c_int, batch: c_int, _vector: c_int, _lengths: Word, _fill: Word,
    ) {
        let Some(object) = object(handle) else { return INVALID_VALUE };
        *lock(&object.data) = Data { steps: steps.max(0) as usize, batch: batch.max(0) as usize };
        OK
    }
    Guess fn cudnnGetRNNWeightSpaceSize(_handle: Word, network: Word, size: Out<usize>) {
        let Some(object) = object(network) else { return INVALID_VALUE };
        size.give(lock(&object.network).weights())
    }
    Guess fn cudnnGetRNNWeightParams(
        _handle: Word, network: Word, pseudo_layer: c_int, _size: usize, weights: Word, linear: c_int,
        matrix: Word, matrix_at: Out<usize>, bias: Word, bias_at: Out<usize>,
    ) {
        let Some(object) = object(network) else { return INVALID_VALUE };
        let net = *lock(&object.network);
        let (layer, linear) = (pseudo_layer.max(0) as usize, linear.max(0) as usize);
        let (rows, columns) = net.matrix(layer, linear);
        describe(matrix, net.data_type, [1, rows, columns]);
        let at = weights + net.before(layer, linear) * width(net.data_type);
        matrix_at.put(if rows * columns > 0 { at } else { 0 });
        describe(bias, net.data_type, [1, net.hidden, 1]);
        let number = layer * 2 * net.gates() + linear;
        let at = weights + (net.matrices() + number * net.hidden) * width(net.data_type);
        bias_at.put(if net.bias && linear < 2 * net.gates() { at } else { 0 });
        OK
    }
    Guess fn cudnnGetRNNTempSpaceSizes(
        _handle: Word, network: Word, training: c_int, data: Word, workspace: Out<usize>, reserve: Out<usize>,
    ) {
        let (Some(network), Some(data)) = (object(network), object(data)) else { return INVALID_VALUE };
        let (net, data) = (*lock(&network.network), *lock(&data.data));
        let step = net.layers * net.directions * data.batch * net.hidden * width(net.data_type);
        // Every step's gates of one layer to work in; in training every layer's gates, cell and
        // output of every step are kept for the way back.
        workspace.put(step * net.gates() * 2);
        reserve.put(if training == 0 { 0 } else { step * data.steps * (net.gates() + 2) });
        OK
    }
    /// One generator state per thread that a card can hold.
    Guess fn cudnnDropoutGetStatesSize(_handle: Word, size: Out<usize>) {
        size.give(machine().spec.sms as usize * 2048 * 48)
    }
}

#[cfg(test)]
mod tests {
    use super::Network;

    #[test]
    fn the_packed_weights_have_as_many_elements_as_the_modules_parameters() {
        // torch.nn.LSTM(64, 128, 2): 4 * 128 * (64 + 128 + 2) + 4 * 128 * (128 + 128 + 2).
        let lstm = Network {
            cell: 2,
            bias: true,
            directions: 1,
            data_type: 0,
            input: 64,
            hidden: 128,
            projected: 0,
            layers: 2,
        };
        assert_eq!(lstm.weights(), 4 * (4 * 128 * (64 + 128 + 2) + 4 * 128 * (128 + 128 + 2)));
        // torch.nn.GRU(8, 16, bidirectional=True, bias=False).
        let gru = Network {
            cell: 3,
            bias: false,
            directions: 2,
            data_type: 2,
            input: 8,
            hidden: 16,
            projected: 0,
            layers: 1,
        };
        assert_eq!(gru.weights(), 2 * (2 * 3 * 16 * (8 + 16)));
    }
}
