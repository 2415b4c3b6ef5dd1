//! The symbols of the legacy `libnvToolsExt.so.1`, which torch 2.1 and old C programs link.
//!
//! The real function runs first: a tool behind it gets its call, and its result is the program's. The
//! library of CUDA 12 asks for the injection itself, at its first call; then the injection tells of the
//! call, and the symbol only passes it on.

use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicBool, Ordering};

use memtrace_trace::Api;

use super::{
    Attributes, DEFAULT, NO_TRACKING, ascii, category_named, created, domain_pushed, domain_started, ended,
    read, registered, started, wide,
};
use crate::attribution::ranges;
use crate::ffi::symbols::{RealFn, c_name};
use crate::runtime::guard::shielded;
use crate::runtime::session;

/// Is the injection in the legacy library?
static INJECTED: AtomicBool = AtomicBool::new(false);

/// It is.
pub(super) fn injected() {
    INJECTED.store(true, Ordering::Release);
}

/// What the library gave, where it gave something: with no tool behind it, it answers 0.
fn given<T: Default + PartialEq>(answer: T) -> Option<T> {
    (answer != T::default()).then_some(answer)
}

/// Defines each function of the library: `$then` tells of the call and gives the program its answer.
macro_rules! legacy {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty, $real:ident, else $without:expr => |$answer:ident| $then:expr;)*) => { $(
        static $real: RealFn<unsafe extern "C" fn($($type),*) -> $result> =
            // SAFETY: the signature is the one in nvToolsExt.h.
            unsafe { RealFn::new(c_name(concat!(stringify!($name), "\0")), "libnvToolsExt.so") };

        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $type),*) -> $result {
            // SAFETY: the program's own arguments, passed on unchanged.
            let $answer = $real.get().map_or($without, |real| unsafe { real($($arg),*) });
            let told = INJECTED.load(Ordering::Acquire);
            if !told && session::session().is_some_and(|session| session.settings.nvtx) { $then } else { $answer }
        }
    )* };
}

legacy! {
    nvtxRangePushA(text: *const c_char) -> c_int, PUSH_A, else NO_TRACKING => |answer| {
        // SAFETY: the program's own string.
        shielded(|| ranges::push(&unsafe { ascii(text) }, DEFAULT, None));
        answer
    };
    nvtxRangePushW(text: *const u32) -> c_int, PUSH_W, else NO_TRACKING => |answer| {
        // SAFETY: the program's own string.
        shielded(|| ranges::push(&unsafe { wide(text) }, DEFAULT, None));
        answer
    };
    nvtxRangePushEx(attributes: *const Attributes) -> c_int, PUSH_EX, else NO_TRACKING => |answer| {
        // SAFETY: the program's own attributes.
        shielded(|| ranges::push(&unsafe { read(DEFAULT, attributes) }.0, DEFAULT, None));
        answer
    };
    nvtxRangePop() -> c_int, POP, else NO_TRACKING => |answer| {
        shielded(|| ranges::pop(DEFAULT));
        answer
    };
    nvtxRangeStartA(text: *const c_char) -> u64, START_A, else 0 => |answer| {
        // SAFETY: the program's own string.
        started(&unsafe { ascii(text) }, DEFAULT, None, given(answer))
    };
    nvtxRangeStartW(text: *const u32) -> u64, START_W, else 0 => |answer| {
        // SAFETY: the program's own string.
        started(&unsafe { wide(text) }, DEFAULT, None, given(answer))
    };
    nvtxRangeStartEx(attributes: *const Attributes) -> u64, START_EX, else 0 => |answer| {
        // SAFETY: the program's own attributes.
        started(&unsafe { read(DEFAULT, attributes) }.0, DEFAULT, None, given(answer))
    };
    nvtxRangeEnd(id: u64) -> (), END, else () => |_answer| ended(id);
    nvtxMarkA(text: *const c_char) -> (), MARK_A, else () => |_answer| {
        // SAFETY: the program's own string.
        shielded(|| ranges::mark(Api::Nvtx, &unsafe { ascii(text) }));
    };
    nvtxMarkW(text: *const u32) -> (), MARK_W, else () => |_answer| {
        // SAFETY: the program's own string.
        shielded(|| ranges::mark(Api::Nvtx, &unsafe { wide(text) }));
    };
    nvtxMarkEx(attributes: *const Attributes) -> (), MARK_EX, else () => |_answer| {
        // SAFETY: the program's own attributes.
        shielded(|| ranges::mark(Api::Nvtx, &unsafe { read(DEFAULT, attributes) }.0));
    };
    nvtxDomainCreateA(name: *const c_char) -> usize, DOMAIN_CREATE_A, else 0 => |answer| {
        // SAFETY: the program's own string.
        created(unsafe { ascii(name) }, given(answer))
    };
    nvtxDomainCreateW(name: *const u32) -> usize, DOMAIN_CREATE_W, else 0 => |answer| {
        // SAFETY: the program's own string.
        created(unsafe { wide(name) }, given(answer))
    };
    nvtxDomainRegisterStringA(domain: usize, text: *const c_char) -> usize, DOMAIN_REGISTER_A, else 0 => |answer| {
        // SAFETY: the program's own string.
        registered(unsafe { ascii(text) }, given(answer))
    };
    nvtxDomainRegisterStringW(domain: usize, text: *const u32) -> usize, DOMAIN_REGISTER_W, else 0 => |answer| {
        // SAFETY: the program's own string.
        registered(unsafe { wide(text) }, given(answer))
    };
    nvtxDomainNameCategoryA(domain: usize, category: u32, name: *const c_char) -> (), DOMAIN_CATEGORY_A, else () => |_answer| {
        // SAFETY: the program's own string.
        category_named(domain, category, || unsafe { ascii(name) });
    };
    nvtxDomainNameCategoryW(domain: usize, category: u32, name: *const u32) -> (), DOMAIN_CATEGORY_W, else () => |_answer| {
        // SAFETY: the program's own string.
        category_named(domain, category, || unsafe { wide(name) });
    };
    nvtxDomainRangePushEx(domain: usize, attributes: *const Attributes) -> c_int, DOMAIN_PUSH, else NO_TRACKING => |answer| {
        // SAFETY: the program's own attributes.
        unsafe { domain_pushed(domain, attributes) };
        answer
    };
    nvtxDomainRangePop(domain: usize) -> c_int, DOMAIN_POP, else NO_TRACKING => |answer| {
        shielded(|| ranges::pop(domain));
        answer
    };
    nvtxDomainRangeStartEx(domain: usize, attributes: *const Attributes) -> u64, DOMAIN_START, else 0 => |answer| {
        // SAFETY: the program's own attributes.
        unsafe { domain_started(domain, attributes, given(answer)) }
    };
    nvtxDomainRangeEnd(_domain: usize, id: u64) -> (), DOMAIN_END, else () => |_answer| ended(id);
    nvtxDomainMarkEx(domain: usize, attributes: *const Attributes) -> (), DOMAIN_MARK, else () => |_answer| {
        // SAFETY: the program's own attributes.
        shielded(|| ranges::mark(Api::Nvtx, &unsafe { read(domain, attributes) }.0));
    };
}
