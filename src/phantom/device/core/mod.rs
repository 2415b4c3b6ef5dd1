//! The base layer: the types of the C interface, the macro that defines exported functions, and the simulated
//! machine with its devices, memory, streams and threads. It does not depend on the calls above it.
//!
//! | subject | modules |
//! | --- | --- |
//! | the interface to C | [`ffi`], [`call_table`], [`call_rules`], [`const_text`], [`on_behalf`] |
//! | the host, its devices and their time | [`host_state`], [`device`], [`stream`], [`clock`], [`watchdog`], [`capture`], [`driver_version`] |
//! | the machine that several processes share | [`machine`], [`machine_state`], [`unified`] |
//! | device memory | [`vram`], [`driver_regions`], [`range_allocator`], [`async_pool`], [`torch_blocks`], [`past_oom`] |
//! | host memory | [`pinned_pages`], [`host_pages`] |
//! | the known content of device memory | [`values`], [`address_ranges`], [`dynamic_sizes`], [`flag_links`], [`addresses`], [`address_tables`], [`running_ops`], [`loop_guard`] |
//! | the loader | [`dlopen`], [`nvml_file`], [`loaded_library`], [`triton`] |
//! | injected errors | [`faults`] |
//! | helpers | [`lock`], [`bytes`] |

pub(crate) mod address_ranges;
pub(crate) mod address_tables;
pub(crate) mod addresses;
pub(crate) mod async_pool;
pub(crate) mod bytes;
pub(crate) mod call_rules;
pub(crate) mod call_table;
pub(crate) mod capture;
pub(crate) mod clock;
pub(crate) mod const_text;
pub(crate) mod device;
pub(crate) mod dlopen;
pub(crate) mod driver_regions;
pub(crate) mod driver_version;
pub(crate) mod dynamic_sizes;
pub(crate) mod faults;
pub(crate) mod ffi;
pub(crate) mod flag_links;
pub(crate) mod host_pages;
pub(crate) mod host_state;
pub(crate) mod loaded_library;
pub(crate) mod lock;
pub(crate) mod loop_guard;
pub(crate) mod machine;
pub(crate) mod machine_state;
pub(crate) mod nvml_file;
pub(crate) mod on_behalf;
pub(crate) mod past_oom;
pub(crate) mod pinned_pages;
pub(crate) mod range_allocator;
pub(crate) mod running_ops;
pub(crate) mod stream;
pub(crate) mod torch_blocks;
pub(crate) mod triton;
pub(crate) mod unified;
pub(crate) mod values;
pub(crate) mod vram;
pub(crate) mod watchdog;
