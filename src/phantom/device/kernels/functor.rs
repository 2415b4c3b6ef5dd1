//! Determines the number of operands of PyTorch's elementwise kernels from the mangled name of the functor.

use crate::core::bytes::after;

/// Returns the number of arguments of the functor passed to `gpu_kernel_impl` or `gpu_kernel_impl_nocast`, or
/// `None` if the name does not show it.
pub(crate) fn arity(name: &[u8]) -> Option<usize> {
    // The functor is the first template argument. The parameters of the function follow, then the lambda that
    // the kernel runs.
    let rest =
        [&b"gpu_kernel_impl_nocastI"[..], b"gpu_kernel_implI"].iter().find_map(|part| after(name, part))?;
    let functor = rest.strip_suffix(b"RKT_EUliE_EEviT1_")?;
    let named: [(&[u8], usize); 6] = [
        (b"NS0_13BinaryFunctorI", 2),
        (b"NS0_13AUnaryFunctorI", 1),
        (b"NS0_13BUnaryFunctorI", 1),
        (b"NS0_15CUDAFunctor_addI", 2),
        (b"NS0_21CUDAFunctorOnSelf_addI", 1),
        (b"NS0_11FillFunctorI", 0),
    ];
    if let Some(&(_, arity)) = named.iter().find(|(part, _)| functor.starts_with(part)) {
        return Some(arity);
    }
    // A lambda's type is encoded as `UlTYPESE_`. If the functor is a local lambda, its name starts with `Z`,
    // and the last such text is its own.
    let last = functor.windows(2).rposition(|window| window == b"Ul").filter(|_| functor[0] == b'Z')?;
    count_types(&functor[last + 2..])
}

/// Returns the number of types before the `E` that ends the parameter list of a lambda (Itanium C++ ABI,
/// section 5.1.8).
fn count_types(mut rest: &[u8]) -> Option<usize> {
    if let Some(after) = rest.strip_prefix(b"v") {
        return after.starts_with(b"E").then_some(0);
    }
    let mut count = 0;
    loop {
        match *rest.first()? {
            b'E' => return Some(count),
            b'a'..=b'y' => rest = &rest[1..],
            b'S' => {
                let end = rest.iter().position(|&byte| byte == b'_')?;
                if !rest[1..end].iter().all(|byte| byte.is_ascii_digit() || byte.is_ascii_uppercase()) {
                    return None;
                }
                rest = &rest[end + 1..];
            }
            b'N' => rest = after_nested_name(&rest[1..])?,
            _ => return None,
        }
        count += 1;
    }
}

/// Returns the text after the `E` of a nested name such as `N3c107complexIfEE`, which contains only plain
/// names and types.
fn after_nested_name(mut rest: &[u8]) -> Option<&[u8]> {
    let mut depth = 1;
    while depth > 0 {
        match *rest.first()? {
            b'E' => (rest, depth) = (&rest[1..], depth - 1),
            b'I' | b'N' => (rest, depth) = (&rest[1..], depth + 1),
            b'0'..=b'9' => {
                let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
                let length: usize = std::str::from_utf8(&rest[..digits]).ok()?.parse().ok()?;
                rest = rest.get(digits.checked_add(length)?..)?;
            }
            b'a'..=b'y' => rest = &rest[1..],
            _ => return None,
        }
    }
    Some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_arguments_is_read_from_the_name_of_a_functor_or_a_lambda() {
        let copy =
            b"_ZN2at6native18elementwise_kernelILi128ELi2EZNS0_22gpu_kernel_impl_nocastIZZZNS0_23direct_copy\
            _kernel_cudaERNS_18TensorIteratorBaseEENKUlvE1_clEvENKUlvE2_clEvEUllE_EEvS4_RKT_EUliE_EEviT1_";
        assert_eq!(arity(copy), Some(1));
        assert_eq!(arity(b"_ZN2at6native18elementwise_kernelIfEE"), None);
        for (functor, expected) in [
            (&b"NS0_13BinaryFunctorIfffNS0_15binary_internal10MulFunctorIfEEEE"[..], Some(2)),
            (b"NS0_13BUnaryFunctorIfffX", Some(1)),
            (b"NS0_11OtherFunctorIfE", None),
            (b"ZNS0_4workEvENKUlvE_clEvEUlfffE_", Some(3)),
            (b"ZNS0_4workEvEUlN3c107complexIfEES3_E_", Some(2)),
            (b"ZNS0_4workEvEUlvE_", Some(0)),
            (b"ZNS0_4workEvEUlPfE_", None),
        ] {
            let name = [
                b"_ZN2at18elementwise_kernelIZNS0_22gpu_kernel_impl_nocastI",
                functor,
                b"EEvS4_RKT_EUliE_EEviT1_",
            ]
            .concat();
            assert_eq!(arity(&name), expected, "{}", String::from_utf8_lossy(functor));
        }
    }
}
