//! The workspaces that cuSOLVER, cuFFT and cuSPARSE ask for. PyTorch allocates them before each call.
//!
//! NVIDIA documents no sizes. The rules here are fitted to the answers of an H200 (CUDA 13.0, driver 580,
//! torch 2.11.0) and used for every card. Measured were square matrices of orders 32 to 2048 in float32 and
//! float64, transforms of 100 to 1,048,576 elements, and sparse matrices with up to 1,120,583 elements. Each
//! rule names the orders that it reproduces. The split of a size between rows and columns, complex matrices,
//! and orders above 2048 are extrapolated. The functions count elements unless their names end in `bytes`.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{LazyLock, Mutex};

use crate::core::call_table::answers;
use crate::core::ffi::{In, OK, Out, Status, Word, opaque_handle};
use crate::core::host_state::host_state;
use crate::core::lock::lock;
use crate::libs::handle_memory;

/// Returns a length that the program passed. A negative length counts as 0, and the limit keeps products of
/// two lengths below 2^64.
fn length(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0).min(1 << 28)
}

/// Returns the bytes of an element of a `cudaDataType`.
fn element_bytes(data_type: c_int) -> u64 {
    match data_type {
        2 | 14 => 2,     // CUDA_R_16F, CUDA_R_16BF
        0 | 6 | 15 => 4, // CUDA_R_32F, CUDA_C_16F, CUDA_C_16BF
        5 => 16,         // CUDA_C_64F
        _ => 8,          // CUDA_R_64F, CUDA_C_32F
    }
}

/// Cholesky: exact for the five measured orders, with the same bytes for both types.
fn potrf_bytes(n: u64) -> u64 {
    128 + (4 * n.div_ceil(32).pow(2)).next_multiple_of(32)
}

/// LU: exact for the five measured orders. Where the part for each multiprocessor begins is not known: it is
/// absent at order 1024 and present at order 2048.
fn getrf_bytes(rows: u64, columns: u64, element: u64, multiprocessors: u64) -> u64 {
    let n = rows.max(columns);
    let pivots = 256 + (8 * n).next_multiple_of(256);
    match n {
        ..=1024 => pivots + (8 * n.min(512)).next_multiple_of(256),
        _ => pivots + 2048 + 64 * element * multiprocessors,
    }
}

/// QR: exact for the five measured orders.
fn geqrf(rows: u64, columns: u64) -> u64 {
    512 * (rows.max(256) + columns.max(256)) + 2 * 512 * 512
}

/// The orthogonal factor of QR: exact for the five measured orders.
fn orgqr(rows: u64, columns: u64, reflectors: u64) -> u64 {
    128 * rows.max(128) + columns * reflectors.min(256) + 128 * 128 + 256
}

/// Applies the orthogonal factor to a matrix with `columns` columns: exact for orders 256 to 1024, and 0.03%
/// too large for order 32.
fn ormqr(rows: u64, columns: u64, reflectors: u64) -> u64 {
    let copies = (rows * (columns + reflectors)).next_multiple_of(32);
    copies + 256 * (rows + columns + reflectors) + reflectors.next_multiple_of(32) + 256 * 256 + 256
}

/// Eigenvalues by divide and conquer: exact for orders 256 to 1024, and 0.03% too large for order 32. One
/// measured order is above 700, so the second rule is a guess in all but its value there.
fn syevd(n: u64) -> u64 {
    (3 * n * n + 768 * n + 65603).max(4 * n * n + 159 * n + 195)
}

fn syevd_bytes(n: u64, element: u64) -> u64 {
    128 + element * syevd(n)
}

/// The batched form of [`syevd`], which PyTorch uses for orders up to 32.
fn syev_batched_bytes(n: u64, element: u64, batch: u64) -> u64 {
    batch.saturating_mul(syevd(n) - 64).saturating_add(64).saturating_mul(element).saturating_add(128)
}

/// Eigenvalues by Jacobi's method, which PyTorch uses for float32 from order 32 to 512: exact for the two
/// measured orders, 32 and 256.
fn syevj(n: u64) -> u64 {
    n * n + 34 * n + 5 * n.div_ceil(32) + 992
}

/// Singular values by Jacobi's method: exact for orders 256 and 1024, and 0.1% too large for order 513.
fn gesvdj(rows: u64, columns: u64) -> u64 {
    2 * rows * columns + 70 * rows.min(columns).next_multiple_of(32) + 32
}

/// The batched form of [`gesvdj`], which PyTorch uses for orders up to 32. It does not depend on the number
/// of matrices; other orders than 32 were not measured.
const GESVDJ_BATCHED: u64 = 992;

/// Returns the largest prime factor of a length.
fn largest_prime(mut n: u64) -> u64 {
    let (mut prime, mut largest) = (2, 1);
    while prime * prime <= n {
        if n.is_multiple_of(prime) {
            n /= prime;
            largest = prime;
        } else {
            prime += 1;
        }
    }
    largest.max(n)
}

/// Returns the least product of powers of 2, 3 and 5 that is at least `n`, which is at most 2^30.
fn next_smooth(n: u64) -> u64 {
    let powers = |base: u64| std::iter::successors(Some(1), move |power| Some(power * base)).take(20);
    let odd = powers(3).flat_map(|three| powers(5).take(14).map(move |five| three * five));
    odd.map(|odd: u64| odd * n.div_ceil(odd).next_power_of_two()).min().unwrap_or(n)
}

/// The kind of a transform.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Transform {
    Complex,
    FromReal,
    ToReal,
}

/// Returns the bytes for transforms of `rows` rows of `n` elements; `complex` is the size of a complex number.
/// It is exact for the 60 measured 1-dimensional transforms, and for 14 of 15 with two dimensions.
///
/// - A real transform works on half as many complex numbers. If `n` is odd, it works on two rows at once.
/// - Bluestein's algorithm needs two padded copies. The lengths 4098 and more with a prime above 127 use it,
///   the lengths up to 999 do not.
/// - Other long rows need a copy: the lengths 1024 do not, 32768 do. The bound between them is a guess.
/// - Shorter rows need one only if real numbers are made from an even length with a prime above 11.
fn fft_bytes(transform: Transform, n: u64, rows: u64, complex: u64) -> u64 {
    let is_complex = transform == Transform::Complex;
    let is_even = n.is_multiple_of(2);
    let (half, pairs) = match (is_complex, is_even) {
        (true, _) => (n, rows),
        (false, true) => (n / 2, rows),
        (false, false) => (n, rows.div_ceil(2)),
    };
    let prime = largest_prime(half);
    let copy = pairs * half * complex;
    if prime > 127 && half > 2048 {
        let padded = 2 * next_smooth(2 * half - 1) * pairs * complex;
        return match is_complex {
            true => padded.next_multiple_of(2048),
            false => (padded + 1).next_multiple_of(2048) + copy,
        };
    }
    match transform {
        Transform::Complex if n * complex > LONG_ROW => copy,
        Transform::FromReal | Transform::ToReal if half * complex > LONG_ROW => rows * (n / 2 + 1) * complex,
        Transform::ToReal if is_even && prime > 11 => copy,
        _ => 0,
    }
}

/// The bytes of the longest row that a transform keeps on the multiprocessor.
const LONG_ROW: u64 = 64 << 10;

/// Returns the workspace of a plan: the largest that one of its dimensions needs.
fn plan_bytes(transform: Transform, lengths: &[u64], batch: u64, complex: u64) -> u64 {
    let Some((&last, others)) = lengths.split_last() else { return 0 };
    let stored = if transform == Transform::Complex { last } else { last / 2 + 1 };
    // No real transform has more elements, and fewer keep the products below 2^64.
    let limited = |a: u64, b: u64| a.saturating_mul(b).min(1 << 48);
    let along = |n: u64, transform, all: u64| {
        fft_bytes(transform, n, limited(all / n.max(1), batch).min((1 << 48) / n.max(1)), complex)
    };
    let outer = others.iter().fold(1, |all, &n| limited(all, n));
    let rows =
        others.iter().map(|&n| along(n, Transform::Complex, limited(outer, stored))).max().unwrap_or(0);
    rows.max(along(last, transform, limited(outer, last)))
}

/// The bytes that cuSPARSE adds so that it can align a workspace.
const ALIGNMENT: u64 = 7;

/// The product of a sparse and a dense matrix: exact for the three measured sizes of each algorithm.
fn spmm_bytes(elements: u64, algorithm: c_int) -> u64 {
    match algorithm {
        4 => ALIGNMENT + 4 * elements.div_ceil(256), // CUSPARSE_SPMM_CSR_ALG1
        6 => ALIGNMENT + 8 * elements.div_ceil(24),  // CUSPARSE_SPMM_CSR_ALG2
        _ => 0,
    }
}

/// The product of a sparse matrix and a vector: exact for 256 and 4096 elements, the two measured sizes.
fn spmv_bytes(elements: u64) -> u64 {
    ALIGNMENT + 8 * (1 + elements.div_ceil(2048))
}

/// The two workspaces of a product of sparse matrices, measured for matrices of 256 and 4096 rows with one
/// element each: the first is exact, the second is 0.7% too large for 4096 elements.
fn spgemm_bytes(elements: u64) -> [u64; 2] {
    [12 * elements + 1072 + ALIGNMENT, 37 * elements + 2856 + ALIGNMENT]
}

/// The number of stored elements of each sparse matrix, by the address of its descriptor.
static ELEMENTS: LazyLock<Mutex<HashMap<usize, i64>>> = LazyLock::new(Mutex::default);

fn create_sparse(out: Out<usize>, elements: i64) -> Status {
    let handle = opaque_handle();
    lock(&ELEMENTS).insert(handle, elements);
    out.give(handle)
}

fn elements_of(matrix: Word) -> u64 {
    length(lock(&ELEMENTS).get(&matrix).copied().unwrap_or(0))
}

/// Writes a number of elements, which fits into an `int`.
fn give(out: Out<c_int>, elements: u64) -> Status {
    out.give(c_int::try_from(elements).unwrap_or(c_int::MAX))
}

/// Writes the bytes on the device; the workspace on the host is empty.
fn give_bytes(device: Out<usize>, host: Out<usize>, bytes: u64) -> Status {
    host.put(0);
    device.give(bytes as usize)
}

fn give_getrf(out: Out<c_int>, rows: c_int, columns: c_int, element: u64) -> Status {
    let (rows, columns) = (length(rows.into()), length(columns.into()));
    give(out, getrf_bytes(rows, columns, element, host_state().spec.sms.into()) / element)
}

fn give_orgqr(out: Out<c_int>, rows: c_int, columns: c_int, reflectors: c_int) -> Status {
    give(out, orgqr(length(rows.into()), length(columns.into()), length(reflectors.into())))
}

fn give_ormqr(out: Out<c_int>, rows: c_int, columns: c_int, reflectors: c_int) -> Status {
    give(out, ormqr(length(rows.into()), length(columns.into()), length(reflectors.into())))
}

fn give_gesvdj(out: Out<c_int>, rows: c_int, columns: c_int) -> Status {
    give(out, gesvdj(length(rows.into()), length(columns.into())))
}

answers! {
    Guess fn cusolverDnXpotrf_bufferSize(
        _handle: Word, _params: Word, _fill: Word, n: i64, _type: c_int, _a: Word, _lda: Word,
        _compute: Word, device: Out<usize>, host: Out<usize>,
    ) { give_bytes(device, host, potrf_bytes(length(n))) }
    Guess fn cusolverDnXgeqrf_bufferSize(
        _handle: Word, _params: Word, rows: i64, columns: i64, data_type: c_int, _a: Word, _lda: Word,
        _tau_type: Word, _tau: Word, _compute: Word, device: Out<usize>, host: Out<usize>,
    ) {
        let bytes = 128 + element_bytes(data_type) * geqrf(length(rows), length(columns));
        give_bytes(device, host, bytes)
    }
    Guess fn cusolverDnXsyevd_bufferSize(
        _handle: Word, _params: Word, _vectors: Word, _fill: Word, n: i64, data_type: c_int, _a: Word,
        _lda: Word, _w_type: Word, _w: Word, _compute: Word, device: Out<usize>, host: Out<usize>,
    ) { give_bytes(device, host, syevd_bytes(length(n), element_bytes(data_type))) }
    Guess fn cusolverDnXsyevBatched_bufferSize(
        _handle: Word, _params: Word, _vectors: Word, _fill: Word, n: i64, data_type: c_int, _a: Word,
        _lda: Word, _w_type: Word, _w: Word, _compute: Word, device: Out<usize>, host: Out<usize>, batch: i64,
    ) { give_bytes(device, host, syev_batched_bytes(length(n), element_bytes(data_type), length(batch))) }

    Guess fn cusolverDnSgetrf_bufferSize(
        _handle: Word, rows: c_int, columns: c_int, _a: Word, _lda: Word, out: Out<c_int>,
    ) { give_getrf(out, rows, columns, 4) }
    Guess fn {cusolverDnDgetrf_bufferSize, cusolverDnCgetrf_bufferSize}(
        _handle: Word, rows: c_int, columns: c_int, _a: Word, _lda: Word, out: Out<c_int>,
    ) {
        give_getrf(out, rows, columns, 8)
    }
    Guess fn cusolverDnZgetrf_bufferSize(
        _handle: Word, rows: c_int, columns: c_int, _a: Word, _lda: Word, out: Out<c_int>,
    ) { give_getrf(out, rows, columns, 16) }

    Guess fn {
        cusolverDnSorgqr_bufferSize, cusolverDnDorgqr_bufferSize, cusolverDnCungqr_bufferSize,
        cusolverDnZungqr_bufferSize,
    }(
        _handle: Word, rows: c_int, columns: c_int, reflectors: c_int, _a: Word, _lda: Word, _tau: Word,
        out: Out<c_int>,
    ) {
        give_orgqr(out, rows, columns, reflectors)
    }

    Guess fn {
        cusolverDnSormqr_bufferSize, cusolverDnDormqr_bufferSize, cusolverDnCunmqr_bufferSize,
        cusolverDnZunmqr_bufferSize,
    }(
        _handle: Word, _side: Word, _operation: Word, rows: c_int, columns: c_int, reflectors: c_int,
        _a: Word, _lda: Word, _tau: Word, _c: Word, _ldc: Word, out: Out<c_int>,
    ) {
        give_ormqr(out, rows, columns, reflectors)
    }

    // PyTorch uses the other types of this call only if a program asks for Jacobi's method.
    Guess fn cusolverDnSsyevj_bufferSize(
        _handle: Word, _vectors: Word, _fill: Word, n: c_int, _a: Word, _lda: Word, _w: Word,
        out: Out<c_int>, _params: Word,
    ) { give(out, syevj(length(n.into()))) }

    Guess fn {
        cusolverDnSgesvdj_bufferSize, cusolverDnDgesvdj_bufferSize, cusolverDnCgesvdj_bufferSize,
        cusolverDnZgesvdj_bufferSize,
    }(
        _handle: Word, _vectors: Word, _economy: Word, rows: c_int, columns: c_int, _a: Word, _lda: Word,
        _s: Word, _u: Word, _ldu: Word, _v: Word, _ldv: Word, out: Out<c_int>, _params: Word,
    ) {
        give_gesvdj(out, rows, columns)
    }
    Guess fn {
        cusolverDnSgesvdjBatched_bufferSize, cusolverDnDgesvdjBatched_bufferSize,
        cusolverDnCgesvdjBatched_bufferSize, cusolverDnZgesvdjBatched_bufferSize,
    }(
        _handle: Word, _vectors: Word, _rows: Word, _columns: Word, _a: Word, _lda: Word, _s: Word, _u: Word,
        _ldu: Word, _v: Word, _ldv: Word, out: Out<c_int>, _params: Word, _batch: Word,
    ) {
        give(out, GESVDJ_BATCHED)
    }

    Guess fn cufftXtMakePlanMany(
        _plan: Word, rank: c_int, lengths: In<i64>, _input_embedding: Word, _input_stride: Word,
        _input_distance: Word, input: c_int, _output_embedding: Word, _output_stride: Word,
        _output_distance: Word, output: c_int, batch: i64, size: Out<usize>, execution: c_int,
    ) {
        // SAFETY: cufftXt.h promises `rank` lengths.
        let lengths = (0..rank.clamp(0, 3) as usize).map(|index| unsafe { lengths.at(index) }.get());
        let lengths: Vec<u64> = lengths.flatten().map(length).collect();
        // Data types of real numbers are CUDA_R_32F, CUDA_R_64F, CUDA_R_16F and CUDA_R_16BF.
        let is_real = |data_type: c_int| matches!(data_type, 0 | 1 | 2 | 14);
        let transform = match (is_real(input), is_real(output)) {
            (true, _) => Transform::FromReal,
            (_, true) => Transform::ToReal,
            _ => Transform::Complex,
        };
        let bytes = plan_bytes(transform, &lengths, length(batch), element_bytes(execution));
        size.put(bytes as usize);
        handle_memory::plan_fft()
    }

    Success fn cusparseCreateCsr(
        out: Out<usize>, _rows: Word, _columns: Word, elements: i64, _offsets: Word, _indices: Word,
        _values: Word, _offset_type: Word, _index_type: Word, _base: Word, _value_type: Word,
    ) { create_sparse(out, elements) }
    Success fn cusparseCreateCoo(
        out: Out<usize>, _rows: Word, _columns: Word, elements: i64, _row_indices: Word,
        _column_indices: Word, _values: Word, _index_type: Word, _base: Word, _value_type: Word,
    ) { create_sparse(out, elements) }
    Success fn cusparseDestroySpMat(matrix: Word) {
        lock(&ELEMENTS).remove(&matrix);
        OK
    }
    Guess fn cusparseSpMM_bufferSize(
        _handle: Word, _operation_a: Word, _operation_b: Word, _alpha: Word, matrix: Word, _b: Word,
        _beta: Word, _c: Word, _compute: Word, algorithm: c_int, size: Out<usize>,
    ) { size.give(spmm_bytes(elements_of(matrix), algorithm) as usize) }
    Guess fn cusparseSpMV_bufferSize(
        _handle: Word, _operation: Word, _alpha: Word, matrix: Word, _x: Word, _beta: Word, _y: Word,
        _compute: Word, _algorithm: Word, size: Out<usize>,
    ) { size.give(spmv_bytes(elements_of(matrix)) as usize) }
    Guess fn cusparseSpGEMM_workEstimation(
        _handle: Word, _operation_a: Word, _operation_b: Word, _alpha: Word, matrix: Word, _b: Word,
        _beta: Word, _c: Word, _compute: Word, _algorithm: Word, _description: Word, size: Out<usize>,
        _buffer: Word,
    ) { size.give(spgemm_bytes(elements_of(matrix))[0] as usize) }
    Guess fn cusparseSpGEMM_compute(
        _handle: Word, _operation_a: Word, _operation_b: Word, _alpha: Word, matrix: Word, _b: Word,
        _beta: Word, _c: Word, _compute: Word, _algorithm: Word, _description: Word, size: Out<usize>,
        _buffer: Word,
    ) { size.give(spgemm_bytes(elements_of(matrix))[1] as usize) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes that PyTorch allocated on an H200. The orders 32, 513 and 2048 were not used for the
    /// coefficients.
    #[test]
    fn factorizations_have_the_measured_workspaces() {
        let sms = 132;
        for (n, element, cholesky, lu, qr, q) in [
            (32, 4, 160, 768, 3145856, 136192),
            (32, 8, 160, 768, 6291584, 272384),
            (256, 8, 384, 4352, 6291584, 919552),
            (513, 8, 1312, 8704, 8396928, 1709056),
            (1024, 4, 4224, 12544, 6291584, 1639424),
            (1024, 8, 4224, 12544, 12583040, 3278848),
            (2048, 8, 16512, 86272, 20971648, 6424576),
        ] {
            let found = (
                potrf_bytes(n),
                getrf_bytes(n, n, element, sms),
                128 + element * geqrf(n, n),
                element * orgqr(n, n, n),
            );
            assert_eq!(found, (cholesky, lu, qr, q), "order {n}, {element} bytes");
        }
        assert_eq!(getrf_bytes(2048, 2048, 4, sms), 52480);
        assert_eq!([256, 513, 1024].map(|n| 8 * ormqr(n, n, n)), [3149824, 7893504, 23603200]);
        assert_eq!(4 * ormqr(1024, 1024, 1024), 11801600);
    }

    #[test]
    fn eigenvalues_have_the_measured_workspaces() {
        assert_eq!([256, 513, 1024].map(|n| syevd_bytes(n, 8)), [3670680, 9992880, 34858648]);
        assert_eq!([513, 1024].map(|n| syevd_bytes(n, 4)), [4996504, 17429388]);
        assert_eq!([32, 256].map(|n| 4 * syevj(n)), [12436, 301088]);
        assert_eq!([256, 1024].map(|n| 4 * gesvdj(n, n)), [596096, 8675456]);
        let close = |found: u64, real: u64| found.abs_diff(real) * 500 < real;
        assert!(close(syevd_bytes(32, 8), 745880));
        assert!(close(syev_batched_bytes(32, 4, 4), 1490864) && close(syev_batched_bytes(32, 8, 4), 2981600));
        assert!(close(4 * ormqr(32, 32, 32), 369664) && close(8 * gesvdj(513, 513), 4511232));
    }

    #[test]
    fn transforms_have_the_measured_workspaces() {
        use Transform::{Complex, FromReal, ToReal};
        for (transform, n, one, sixteen, complex) in [
            (Complex, 1000, 0, 0, 8),
            (Complex, 127, 0, 0, 8),
            (Complex, 4099, 139264, 2211840, 8),
            (Complex, 65536, 524288, 8388608, 8),
            (FromReal, 4099, 172056, 1370304, 8),
            (FromReal, 4099, 344112, 2738560, 16),
            (FromReal, 65536, 262152, 4194432, 8),
            (FromReal, 65536, 524304, 8388864, 16),
            (ToReal, 198, 0, 0, 8),
            (ToReal, 254, 1016, 16256, 8),
            (ToReal, 2046, 8184, 130944, 8),
            (ToReal, 8196, 172048, 2738432, 8),
            (ToReal, 131070, 2623480, 41944960, 8),
        ] {
            let found = [1, 16].map(|batch| plan_bytes(transform, &[n], batch, complex));
            assert_eq!(found, [one, sixteen], "{n} elements");
        }
        assert_eq!([1, 7, 8195, 131069, 1 << 30].map(next_smooth), [1, 8, 8640, 131072, 1 << 30]);
        assert_eq!(plan_bytes(ToReal, &[2097150], 1, 8), 8388608);
        assert_eq!(plan_bytes(Complex, &[1024, 1024], 2, 8), 0);
        let huge = length(i64::MAX);
        assert!(plan_bytes(Complex, &[huge, huge, huge], huge, 16) > 1 << 48);
        assert!(syev_batched_bytes(huge, 8, huge) > 1 << 48);
        for (lengths, bytes) in [([64, 126], 0), ([256, 510], 1044480), ([500, 998], 3992000)] {
            assert_eq!(plan_bytes(ToReal, &lengths, 2, 8), bytes, "{lengths:?}");
        }
    }

    #[test]
    fn sparse_products_have_the_measured_workspaces() {
        assert_eq!([256, 4096, 1120583].map(|n| spmm_bytes(n, 6)), [95, 1375, 373535]);
        assert_eq!([256, 4096, 1120583].map(|n| spmm_bytes(n, 4)), [11, 71, 17519]);
        assert_eq!([256, 4096].map(spmv_bytes), [23, 31]);
        assert_eq!(spgemm_bytes(256), [4151, 12335]);
        assert_eq!(spgemm_bytes(4096)[0], 50231);
    }
}
