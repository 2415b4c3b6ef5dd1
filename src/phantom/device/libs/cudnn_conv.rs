//! cuDNN's older convolution calls, which PyTorch uses if the graph API has no engine. A search returns one
//! algorithm that needs no workspace. The answer is a guess.

use std::ffi::c_int;

use cudarc::cudnn::sys::{
    cudnnConvolutionBwdDataAlgo_t, cudnnConvolutionBwdDataAlgoPerf_t, cudnnConvolutionBwdFilterAlgo_t,
    cudnnConvolutionBwdFilterAlgoPerf_t, cudnnConvolutionFwdAlgo_t, cudnnConvolutionFwdAlgoPerf_t,
    cudnnDeterminism_t, cudnnMathType_t, cudnnStatus_t,
};

use crate::core::call_table::answers;
use crate::core::ffi::{Out, Status, Word};

// The three structs have the same layout.
const _: () = assert!(size_of::<cudnnConvolutionFwdAlgoPerf_t>() == 48);
const _: () = assert!(size_of::<cudnnConvolutionBwdDataAlgoPerf_t>() == 48);
const _: () = assert!(size_of::<cudnnConvolutionBwdFilterAlgoPerf_t>() == 48);

/// Writes the result of a search for algorithms, which finds only one.
macro_rules! one_result {
    ($struct:ident, $algorithm:expr, $count:ident, $results:ident) => {{
        $results.put($struct {
            algo: $algorithm,
            status: cudnnStatus_t::CUDNN_STATUS_SUCCESS,
            time: 0.1,
            memory: 0,
            determinism: cudnnDeterminism_t::CUDNN_DETERMINISTIC,
            mathType: cudnnMathType_t::CUDNN_DEFAULT_MATH,
            reserved: [0; 3],
        });
        $count.give(1)
    }};
}

/// Writes one algorithm for a forward convolution: the implicit matrix product with precomputed indices.
fn one_forward(count: Out<c_int>, results: Out<cudnnConvolutionFwdAlgoPerf_t>) -> Status {
    use cudnnConvolutionFwdAlgo_t::CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM as ALGORITHM;
    one_result!(cudnnConvolutionFwdAlgoPerf_t, ALGORITHM, count, results)
}

/// Writes one algorithm for the gradient of the input: the deterministic one.
fn one_backward_data(count: Out<c_int>, results: Out<cudnnConvolutionBwdDataAlgoPerf_t>) -> Status {
    use cudnnConvolutionBwdDataAlgo_t::CUDNN_CONVOLUTION_BWD_DATA_ALGO_1 as ALGORITHM;
    one_result!(cudnnConvolutionBwdDataAlgoPerf_t, ALGORITHM, count, results)
}

/// Writes one algorithm for the gradient of the filter: the deterministic one.
fn one_backward_filter(count: Out<c_int>, results: Out<cudnnConvolutionBwdFilterAlgoPerf_t>) -> Status {
    use cudnnConvolutionBwdFilterAlgo_t::CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1 as ALGORITHM;
    one_result!(cudnnConvolutionBwdFilterAlgoPerf_t, ALGORITHM, count, results)
}

answers! {
    Guess fn cudnnGetConvolutionForwardAlgorithm_v7(
        _handle: Word, _x: Word, _w: Word, _conv: Word, _y: Word, _wanted: c_int, count: Out<c_int>,
        results: Out<cudnnConvolutionFwdAlgoPerf_t>,
    ) {
        one_forward(count, results)
    }
    Guess fn cudnnGetConvolutionBackwardDataAlgorithm_v7(
        _handle: Word, _w: Word, _dy: Word, _conv: Word, _dx: Word, _wanted: c_int, count: Out<c_int>,
        results: Out<cudnnConvolutionBwdDataAlgoPerf_t>,
    ) {
        one_backward_data(count, results)
    }
    Guess fn cudnnGetConvolutionBackwardFilterAlgorithm_v7(
        _handle: Word, _x: Word, _dy: Word, _conv: Word, _dw: Word, _wanted: c_int, count: Out<c_int>,
        results: Out<cudnnConvolutionBwdFilterAlgoPerf_t>,
    ) {
        one_backward_filter(count, results)
    }
    Guess fn cudnnFindConvolutionForwardAlgorithmEx(
        _handle: Word, _x: Word, _x_data: Word, _w: Word, _w_data: Word, _conv: Word, _y: Word, _y_data: Word,
        _wanted: c_int, count: Out<c_int>, results: Out<cudnnConvolutionFwdAlgoPerf_t>, _workspace: Word,
        _size: usize,
    ) {
        one_forward(count, results)
    }
    Guess fn cudnnFindConvolutionBackwardDataAlgorithmEx(
        _handle: Word, _w: Word, _w_data: Word, _dy: Word, _dy_data: Word, _conv: Word, _dx: Word,
        _dx_data: Word, _wanted: c_int, count: Out<c_int>, results: Out<cudnnConvolutionBwdDataAlgoPerf_t>,
        _workspace: Word, _size: usize,
    ) {
        one_backward_data(count, results)
    }
    Guess fn cudnnFindConvolutionBackwardFilterAlgorithmEx(
        _handle: Word, _x: Word, _x_data: Word, _dy: Word, _dy_data: Word, _conv: Word, _dw: Word,
        _dw_data: Word, _wanted: c_int, count: Out<c_int>, results: Out<cudnnConvolutionBwdFilterAlgoPerf_t>,
        _workspace: Word, _size: usize,
    ) {
        one_backward_filter(count, results)
    }
    Guess fn cudnnGetConvolutionForwardWorkspaceSize(
        _handle: Word, _x: Word, _w: Word, _conv: Word, _y: Word, _algorithm: c_int, size: Out<usize>,
    ) {
        size.give(0)
    }
    Guess fn cudnnGetConvolutionBackwardDataWorkspaceSize(
        _handle: Word, _w: Word, _dy: Word, _conv: Word, _dx: Word, _algorithm: c_int, size: Out<usize>,
    ) {
        size.give(0)
    }
    Guess fn cudnnGetConvolutionBackwardFilterWorkspaceSize(
        _handle: Word, _x: Word, _dy: Word, _conv: Word, _dw: Word, _algorithm: c_int, size: Out<usize>,
    ) {
        size.give(0)
    }
}
