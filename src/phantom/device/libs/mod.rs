//! The libraries above CUDA: cuBLAS, cuDNN, cuFFT, cuSOLVER, cuSPARSE, NCCL, NVML and NVRTC.

pub(crate) mod cublas;
pub(crate) mod cudnn;
pub(crate) mod cudnn_conv;
pub(crate) mod cudnn_gpcs;
pub(crate) mod cudnn_norms;
pub(crate) mod cudnn_products;
pub(crate) mod descriptor_addresses;
pub(crate) mod handle_memory;
pub(crate) mod library_calls;
pub(crate) mod nccl;
pub(crate) mod nccl_buffers;
pub(crate) mod nccl_code;
pub(crate) mod nccl_groups;
pub(crate) mod nccl_memory;
pub(crate) mod nvml;
pub(crate) mod nvml_device;
pub(crate) mod nvrtc;
pub(crate) mod rank_mailbox;
pub(crate) mod rnn;
pub(crate) mod rnn_memory;
pub(crate) mod solver_codes;
pub(crate) mod stand_ins;
pub(crate) mod workspaces;
