//! The types of a kernel's parameters. They reveal which parameters only point to constants, and where the
//! addresses in a parameter are.
//!
//! A struct that has more space than a launch needs contains leftovers in the rest: old stack contents, or
//! addresses of an earlier launch. These are not addresses of the current launch.

use crate::kernels::cubin::Parameter;
use crate::kernels::tensor_list::TensorList;

/// The properties of a parameter that its type reveals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Type {
    /// True if the kernel only reads the memory to which the parameter points.
    pub(crate) is_constant: bool,
    pub(crate) addresses: Addresses,
}

/// The locations of the addresses in a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Addresses {
    /// Any offset may hold an address.
    Everywhere,
    /// Only the start holds an address. PyTorch's `TensorInfo` starts with its address; sizes and strides
    /// follow (ATen's `TensorInfo.cuh`).
    First,
    /// The parameter starts with one address per block of threads (`TensorListAddresses` in
    /// ATen's `ForeachReduceOp.cu`).
    PerBlock,
    TensorList(TensorList),
}

impl Type {
    /// The properties of a parameter whose type is not known.
    const UNKNOWN: Self = Self { is_constant: false, addresses: Addresses::Everywhere };

    /// Returns the properties of a parameter with this demangled type and this size.
    fn from_name(parameter: &str, size: usize) -> Self {
        let addresses = if parameter.starts_with(TENSOR_INFO) {
            Addresses::First
        } else if parameter.ends_with("::TensorListAddresses") {
            Addresses::PerBlock
        } else {
            TensorList::from_name(parameter, size).map_or(Addresses::Everywhere, Addresses::TensorList)
        };
        Self { is_constant: is_constant_address(parameter), addresses }
    }
}

/// The start of the type name of PyTorch's description of a tensor.
const TENSOR_INFO: &str = "at::cuda::detail::TensorInfo<";

/// Returns the types of the parameters of the kernel with this mangled name. They are unknown if the name is
/// not mangled or has a different number of parameters.
pub(crate) fn from_name(name: &[u8], parameters: &[Parameter]) -> Vec<Type> {
    let demangled = cpp_demangle::Symbol::new(name).ok().and_then(|symbol| symbol.demangle().ok());
    let text = demangled.unwrap_or_default();
    let types = parameter_types(&text);
    if types.len() != parameters.len() {
        return vec![Type::UNKNOWN; parameters.len()];
    }
    types.into_iter().zip(parameters).map(|(text, parameter)| Type::from_name(text, parameter.size)).collect()
}

/// Returns the types in the last parameter list of a demangled name.
fn parameter_types(text: &str) -> Vec<&str> {
    let bytes = text.as_bytes();
    if bytes.last() != Some(&b')') {
        return Vec::new();
    }
    // Searches backward from the end for the parenthesis that opens the list.
    let (mut depth, mut start) = (0usize, None);
    for (at, byte) in bytes.iter().enumerate().rev() {
        match byte {
            b')' => depth += 1,
            b'(' if depth == 1 => {
                start = Some(at + 1);
                break;
            }
            b'(' => depth -= 1,
            _ => {}
        }
    }
    let Some(list) = start.and_then(|start| text.get(start..text.len() - 1)) else { return Vec::new() };
    let (mut all, mut depth, mut begin) = (Vec::new(), 0i32, 0);
    for (at, byte) in list.bytes().enumerate() {
        match byte {
            b'(' | b'<' | b'{' | b'[' => depth += 1,
            b')' | b'>' | b'}' | b']' => depth -= 1,
            b',' if depth == 0 => {
                all.push(list[begin..at].trim());
                begin = at + 1;
            }
            _ => {}
        }
    }
    all.push(list[begin..].trim());
    all
}

/// Returns true if a type is a pointer to constants, or PyTorch's description of a tensor of constants.
fn is_constant_address(parameter: &str) -> bool {
    if let Some(target) = parameter.strip_suffix('*') {
        return target.trim_end().ends_with(" const");
    }
    let Some(element) = parameter.strip_prefix(TENSOR_INFO) else { return false };
    element.split(',').next().is_some_and(|element| element.ends_with(" const"))
}
