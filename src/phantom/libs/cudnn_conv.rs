//! cuDNN's older convolution calls, which PyTorch takes where the graph API has no engine for it:
//! one algorithm, no workspace. A guess.

use std::ffi::c_int;

use crate::core::ffi::{Out, Status, Word};
use crate::table::call_table::answers;

/// `cudnnConvolution*AlgoPerf_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Performance {
    algorithm: c_int,
    status: c_int,
    milliseconds: f32,
    workspace: usize,
    deterministic: c_int,
    math: c_int,
    reserved: [c_int; 3],
}

/// Algorithm 1 exists for all three directions: the precomputed implicit product forward, the
/// deterministic one backward.
fn one(count: Out<c_int>, results: Out<Performance>) -> Status {
    results.put(Performance {
        algorithm: 1,
        status: 0,
        milliseconds: 0.1,
        workspace: 0,
        deterministic: 1,
        math: 0,
        reserved: [0; 3],
    });
    count.give(1)
}

answers! {
    Guess fn cudnnGetConvolutionForwardAlgorithm_v7(
        _handle: Word, _x: Word, _w: Word, _conv: Word, _y: Word, _wanted: c_int, count: Out<c_int>, results: Out<Performance>,
    ) {
        one(count, results)
    }
    Guess fn cudnnGetConvolutionBackwardDataAlgorithm_v7(
        _handle: Word, _w: Word, _dy: Word, _conv: Word, _dx: Word, _wanted: c_int, count: Out<c_int>, results: Out<Performance>,
    ) {
        one(count, results)
    }
    Guess fn cudnnGetConvolutionBackwardFilterAlgorithm_v7(
        _handle: Word, _x: Word, _dy: Word, _conv: Word, _dw: Word, _wanted: c_int, count: Out<c_int>, results: Out<Performance>,
    ) {
        one(count, results)
    }
    Guess fn cudnnFindConvolutionForwardAlgorithmEx(
        _handle: Word, _x: Word, _x_data: Word, _w: Word, _w_data: Word, _conv: Word, _y: Word, _y_data: Word,
        _wanted: c_int, count: Out<c_int>, results: Out<Performance>, _workspace: Word, _size: usize,
    ) {
        one(count, results)
    }
    Guess fn cudnnFindConvolutionBackwardDataAlgorithmEx(
        _handle: Word, _w: Word, _w_data: Word, _dy: Word, _dy_data: Word, _conv: Word, _dx: Word, _dx_data: Word,
        _wanted: c_int, count: Out<c_int>, results: Out<Performance>, _workspace: Word, _size: usize,
    ) {
        one(count, results)
    }
    Guess fn cudnnFindConvolutionBackwardFilterAlgorithmEx(
        _handle: Word, _x: Word, _x_data: Word, _dy: Word, _dy_data: Word, _conv: Word, _dw: Word, _dw_data: Word,
        _wanted: c_int, count: Out<c_int>, results: Out<Performance>, _workspace: Word, _size: usize,
    ) {
        one(count, results)
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
