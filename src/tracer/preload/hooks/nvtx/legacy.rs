//! The symbols of the legacy `libnvToolsExt.so.1`, which torch 2.1 and old C programs link.
//!
//! The real function runs first, so that an attached tool gets the call and the program gets the tool's
//! result. The library of CUDA 12 loads the injection itself, at its first call. After that, the injection
//! records the calls, and the hooks only pass them on.

use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicBool, Ordering};

use memtrace_trace::Api;

use super::names::{self, Attributes};
use super::shared::{self, DEFAULT_DOMAIN, NO_TRACKING};
use crate::attribution::ranges;
use crate::ffi::symbols::{RealFn, c_name};
use crate::guard::shielded;
use crate::runtime::session;

/// True if the legacy library has loaded the injection.
static INJECTED: AtomicBool = AtomicBool::new(false);

/// Records that the legacy library has loaded the injection.
pub(super) fn set_injected() {
    INJECTED.store(true, Ordering::Release);
}

/// Converts a result of the legacy library: returns `None` for 0, which the library returns without a tool.
fn of_tool<T: Default + PartialEq>(answer: T) -> Option<T> {
    (answer != T::default()).then_some(answer)
}

/// Defines the hook of each function of the library. `$then` records the call and returns the result for the
/// program.
macro_rules! legacy {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty, $real:ident, else $without:expr => |$answer:ident| $then:expr;)*) => { $(
        static $real: RealFn<unsafe extern "C" fn($($type),*) -> $result> =
            // SAFETY: the signature is the one in nvToolsExt.h.
            unsafe { RealFn::new(c_name(concat!(stringify!($name), "\0")), "libnvToolsExt.so") };

        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $type),*) -> $result {
            // SAFETY: the program's arguments are passed on unchanged.
            let $answer = $real.get().map_or($without, |real| unsafe { real($($arg),*) });
            let is_recorded = INJECTED.load(Ordering::Acquire);
            if !is_recorded && session::session().is_some_and(|session| session.settings.nvtx) { $then } else { $answer }
        }
    )* };
}

legacy! {
    nvtxRangePushA(text: *const c_char) -> c_int, PUSH_A, else NO_TRACKING => |answer| {
        // SAFETY: the program passed this string to NVTX.
        shielded(|| ranges::push(&unsafe { names::ascii(text) }, DEFAULT_DOMAIN, None));
        answer
    };
    nvtxRangePushW(text: *const u32) -> c_int, PUSH_W, else NO_TRACKING => |answer| {
        // SAFETY: the program passed this string to NVTX.
        shielded(|| ranges::push(&unsafe { names::wide(text) }, DEFAULT_DOMAIN, None));
        answer
    };
    nvtxRangePushEx(attributes: *const Attributes) -> c_int, PUSH_EX, else NO_TRACKING => |answer| {
        // SAFETY: the program passed these attributes to NVTX.
        shielded(|| ranges::push(&unsafe { names::message_of(DEFAULT_DOMAIN, attributes) }.0, DEFAULT_DOMAIN, None));
        answer
    };
    nvtxRangePop() -> c_int, POP, else NO_TRACKING => |answer| {
        shielded(|| ranges::pop(DEFAULT_DOMAIN));
        answer
    };
    nvtxRangeStartA(text: *const c_char) -> u64, START_A, else 0 => |answer| {
        // SAFETY: the program passed this string to NVTX.
        shared::start(&unsafe { names::ascii(text) }, DEFAULT_DOMAIN, None, of_tool(answer))
    };
    nvtxRangeStartW(text: *const u32) -> u64, START_W, else 0 => |answer| {
        // SAFETY: the program passed this string to NVTX.
        shared::start(&unsafe { names::wide(text) }, DEFAULT_DOMAIN, None, of_tool(answer))
    };
    nvtxRangeStartEx(attributes: *const Attributes) -> u64, START_EX, else 0 => |answer| {
        // SAFETY: the program passed these attributes to NVTX.
        shared::start(&unsafe { names::message_of(DEFAULT_DOMAIN, attributes) }.0, DEFAULT_DOMAIN, None, of_tool(answer))
    };
    nvtxRangeEnd(id: u64) -> (), END, else () => |_answer| shared::end(id);
    nvtxMarkA(text: *const c_char) -> (), MARK_A, else () => |_answer| {
        // SAFETY: the program passed this string to NVTX.
        shielded(|| ranges::mark(Api::Nvtx, &unsafe { names::ascii(text) }));
    };
    nvtxMarkW(text: *const u32) -> (), MARK_W, else () => |_answer| {
        // SAFETY: the program passed this string to NVTX.
        shielded(|| ranges::mark(Api::Nvtx, &unsafe { names::wide(text) }));
    };
    nvtxMarkEx(attributes: *const Attributes) -> (), MARK_EX, else () => |_answer| {
        // SAFETY: the program passed these attributes to NVTX.
        shielded(|| ranges::mark(Api::Nvtx, &unsafe { names::message_of(DEFAULT_DOMAIN, attributes) }.0));
    };
    nvtxDomainCreateA(name: *const c_char) -> usize, DOMAIN_CREATE_A, else 0 => |answer| {
        // SAFETY: the program passed this string to NVTX.
        names::create_domain(unsafe { names::ascii(name) }, of_tool(answer))
    };
    nvtxDomainCreateW(name: *const u32) -> usize, DOMAIN_CREATE_W, else 0 => |answer| {
        // SAFETY: the program passed this string to NVTX.
        names::create_domain(unsafe { names::wide(name) }, of_tool(answer))
    };
    nvtxDomainRegisterStringA(domain: usize, text: *const c_char) -> usize, DOMAIN_REGISTER_A, else 0 => |answer| {
        // SAFETY: the program passed this string to NVTX.
        names::register_string(unsafe { names::ascii(text) }, of_tool(answer))
    };
    nvtxDomainRegisterStringW(domain: usize, text: *const u32) -> usize, DOMAIN_REGISTER_W, else 0 => |answer| {
        // SAFETY: the program passed this string to NVTX.
        names::register_string(unsafe { names::wide(text) }, of_tool(answer))
    };
    nvtxDomainNameCategoryA(domain: usize, category: u32, name: *const c_char) -> (), DOMAIN_CATEGORY_A, else () => |_answer| {
        // SAFETY: the program passed this string to NVTX.
        names::name_category(domain, category, || unsafe { names::ascii(name) });
    };
    nvtxDomainNameCategoryW(domain: usize, category: u32, name: *const u32) -> (), DOMAIN_CATEGORY_W, else () => |_answer| {
        // SAFETY: the program passed this string to NVTX.
        names::name_category(domain, category, || unsafe { names::wide(name) });
    };
    nvtxDomainRangePushEx(domain: usize, attributes: *const Attributes) -> c_int, DOMAIN_PUSH, else NO_TRACKING => |answer| {
        // SAFETY: the program passed these attributes to NVTX.
        unsafe { shared::push_in_domain(domain, attributes) };
        answer
    };
    nvtxDomainRangePop(domain: usize) -> c_int, DOMAIN_POP, else NO_TRACKING => |answer| {
        shielded(|| ranges::pop(domain));
        answer
    };
    nvtxDomainRangeStartEx(domain: usize, attributes: *const Attributes) -> u64, DOMAIN_START, else 0 => |answer| {
        // SAFETY: the program passed these attributes to NVTX.
        unsafe { shared::start_in_domain(domain, attributes, of_tool(answer)) }
    };
    nvtxDomainRangeEnd(_domain: usize, id: u64) -> (), DOMAIN_END, else () => |_answer| shared::end(id);
    nvtxDomainMarkEx(domain: usize, attributes: *const Attributes) -> (), DOMAIN_MARK, else () => |_answer| {
        // SAFETY: the program passed these attributes to NVTX.
        shielded(|| ranges::mark(Api::Nvtx, &unsafe { names::message_of(domain, attributes) }.0));
    };
}
