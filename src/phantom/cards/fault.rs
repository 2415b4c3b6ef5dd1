//! Requests for faults, separated by commas: `oom@step:3`, `ecc@call:cudaLaunchKernel:500`, `lost@alloc:120`.

use std::fmt;

use memtrace_util::size;

use crate::spec::MAX_DEVICES;

/// The calls that take memory from a card. `alloc:` counts exactly these calls, and an `oom` fault makes one
/// of them fail.
pub const ALLOCATIONS: [&str; 12] = [
    "cudaMalloc",
    "cudaMallocAsync",
    "cudaMallocFromPoolAsync",
    "cudaMallocManaged",
    "cudaMallocPitch",
    "cuMemAlloc_v2",
    "cuMemAllocAsync",
    "cuMemAllocFromPoolAsync",
    "cuMemAllocManaged",
    "cuMemAllocPitch_v2",
    "cuMemCreate",
    "cudaMalloc3D",
];

/// The kind of a fault. It also decides which later calls fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// An allocation fails as on a full card, and the program may recover.
    OutOfMemory,
    /// An uncorrectable ECC error, after which the process can no longer use the card.
    Ecc,
    /// The card falls off the bus, after which no process can use the card.
    Lost,
}

/// When a fault occurs. Steps, bytes and calls are counted in each process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Moment {
    /// At this training step, as the tracer counts steps.
    Step(u64),
    /// At this call that takes memory from a card, counted from 1.
    Allocation(u64),
    /// At the allocation that would raise the process's memory on the card above this number of bytes.
    Bytes(u64),
    /// At this call of a function, counted from 1.
    Call(String, u64),
}

/// A fault to inject.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The request as the user typed it.
    pub text: String,
    /// The kind of the failure.
    pub kind: FaultKind,
    /// The number of allocation calls that fail. `None` makes a single request of the program's allocator
    /// fail, including the retries of this request.
    pub times: Option<u32>,
    /// When the fault occurs.
    pub moment: Moment,
    /// The card on which the fault occurs; `None` for any card.
    pub card: Option<u32>,
}

/// The reason why a request for faults is invalid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FaultError {
    fault: String,
    reason: String,
}

impl fmt::Display for FaultError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "`{}`: {}; valid faults are oom@step:3, oom*2@alloc:120, oom@bytes:20g, ecc@call:cudaLaunchKernel:500, \
             lost@step:3@card:1",
            self.fault, self.reason
        )
    }
}

impl std::error::Error for FaultError {}

/// Parses a comma-separated list of faults. An empty text gives an empty list.
///
/// # Errors
/// Returns an error if a fault is invalid. The names of calls are not checked here.
pub fn parse_faults(list: &str) -> Result<Vec<Fault>, FaultError> {
    list.split(',').map(str::trim).filter(|text| !text.is_empty()).map(Fault::parse).collect()
}

impl Fault {
    fn parse(text: &str) -> Result<Self, FaultError> {
        let error = |reason: String| FaultError { fault: text.to_owned(), reason };
        let mut parts = text.split('@');
        let kind = parts.next().unwrap_or_default();
        let (kind, times) = kind.split_once('*').map_or((kind, None), |(kind, times)| (kind, Some(times)));
        let kind = match kind {
            "oom" => FaultKind::OutOfMemory,
            "ecc" => FaultKind::Ecc,
            "lost" => FaultKind::Lost,
            _ => return Err(error(format!("`{kind}` is not a fault: expected oom, ecc or lost"))),
        };
        let times = match times.map(|times| times.parse().ok().filter(|&n: &u32| n > 0)) {
            None => None,
            Some(_) if kind != FaultKind::OutOfMemory => {
                return Err(error("only oom can be repeated: the other faults are permanent".to_owned()));
            }
            Some(None) => return Err(error("expected a repeat count of at least 1 after `*`".to_owned())),
            Some(times) => times,
        };
        let moment =
            parts.next().ok_or_else(|| error("the moment is missing, such as `@step:3`".to_owned()))?;
        let moment = Moment::parse(moment, kind).map_err(error)?;
        let mut card = None;
        for part in parts {
            if card.is_some() {
                return Err(error(format!("`@{part}` follows a card: a fault occurs on one card")));
            }
            let number = part.strip_prefix("card:").and_then(|number| number.parse().ok());
            card = Some(number.filter(|&card| card < MAX_DEVICES).ok_or_else(|| {
                error(format!("`@{part}` is unknown: only a card, such as `@card:0`, may follow the moment"))
            })?);
        }
        Ok(Self { text: text.to_owned(), kind, times, moment, card })
    }
}

impl Moment {
    fn parse(text: &str, kind: FaultKind) -> Result<Self, String> {
        let (name, value) = text.split_once(':').unwrap_or((text, ""));
        let count = |value: &str| {
            let number = value.parse().ok().filter(|&number: &u64| number > 0);
            number.ok_or_else(|| format!("`{name}:` needs a number of at least 1, not `{value}`"))
        };
        match name {
            "step" => value.parse().map(Self::Step).map_err(|_| format!("`{value}` is not a step number")),
            "alloc" => Ok(Self::Allocation(count(value)?)),
            "bytes" => match size::parse(value) {
                Some(bytes) => Ok(Self::Bytes(bytes)),
                None => Err(format!("`{value}` is not a size such as 20g or 500m")),
            },
            "call" => {
                let (call, number) = value.split_once(':').unwrap_or((value, "1"));
                let number = count(number)?;
                let is_name =
                    !call.is_empty() && call.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'_');
                if !is_name {
                    return Err("`call:` needs the name of a function: call:cudaMalloc:3".to_owned());
                }
                if kind == FaultKind::OutOfMemory && !ALLOCATIONS.contains(&call) {
                    return Err(format!(
                        "`{call}` allocates no memory: oom can be injected into {}",
                        ALLOCATIONS.join(", ")
                    ));
                }
                Ok(Self::Call(call.to_owned(), number))
            }
            _ => {
                Err(format!("`{text}` is not a moment: expected step:N, alloc:N, bytes:SIZE or call:NAME:N"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_has_a_kind_a_moment_and_perhaps_a_number_and_a_card() {
        let faults =
            parse_faults("oom@step:3, ecc@call:cudaLaunchKernel:500,oom*2@bytes:1.5g,lost@alloc:120@card:1")
                .unwrap();
        assert_eq!(faults.len(), 4);
        assert_eq!((faults[0].kind, &faults[0].moment), (FaultKind::OutOfMemory, &Moment::Step(3)));
        assert_eq!(faults[1].moment, Moment::Call("cudaLaunchKernel".to_owned(), 500));
        assert_eq!((faults[2].times, &faults[2].moment), (Some(2), &Moment::Bytes(3 << 29)));
        assert_eq!((faults[3].kind, faults[3].card), (FaultKind::Lost, Some(1)));
        assert_eq!(
            parse_faults("oom@call:cudaMalloc").unwrap()[0].moment,
            Moment::Call("cudaMalloc".to_owned(), 1)
        );
        assert_eq!(parse_faults(" , "), Ok(Vec::new()));
    }

    #[test]
    fn an_invalid_fault_is_refused_with_the_reason_and_valid_ones() {
        for (text, part) in [
            ("oom", "the moment is missing"),
            ("fire@step:3", "oom, ecc or lost"),
            ("oom@step:x", "is not a step number"),
            ("oom@step:-1", "is not a step number"),
            ("oom@alloc:0", "at least 1"),
            ("oom@bytes:lots", "is not a size"),
            ("oom@call:cudaLaunchKernel:5", "allocates no memory"),
            ("ecc@call::5", "name of a function"),
            ("ecc@call:rm -rf:5", "name of a function"),
            ("ecc*2@step:3", "the other faults are permanent"),
            ("oom*0@step:3", "repeat count"),
            ("oom*@step:3", "repeat count"),
            ("lost@step:3@card:99", "@card:0"),
            ("lost@step:3@rank:1", "@card:0"),
            ("lost@step:3@card:0@card:1", "on one card"),
            ("oom@soon", "is not a moment"),
            ("@", "is not a fault"),
        ] {
            let error = parse_faults(text).expect_err(text).to_string();
            assert!(
                error.contains(part) && error.contains("oom@step:3") && !error.contains('\n'),
                "{text}: {error}"
            );
        }
    }
}
