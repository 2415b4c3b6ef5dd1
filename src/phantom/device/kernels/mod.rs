//! Kernels: registration, launches, modules, and the effects of known kernels on memory.

pub(crate) mod cubin;
pub(crate) mod elementwise;
pub(crate) mod fatbin;
pub(crate) mod functor;
pub(crate) mod index;
pub(crate) mod kernel;
pub(crate) mod kernel_effects;
pub(crate) mod modules;
pub(crate) mod offset_calculator;
pub(crate) mod parameter_types;
pub(crate) mod recognize;
pub(crate) mod reduce;
pub(crate) mod signature;
pub(crate) mod strided;
pub(crate) mod tensor_list;
