//! `MEMTRACE_DETAIL`: the steps that are recorded in full detail.

use std::fmt;

/// The error for an invalid value.
const FORMS: &str = "expected full, off, peak, or steps:A-B, steps:A and every:N joined by commas";

/// A schedule of detailed steps.
///
/// ```
/// use memtrace_trace::detail::Detail;
///
/// let detail = Detail::parse("steps:0-4,every:500")?;
/// assert!(detail.includes(3) && detail.includes(1000));
/// assert!(!detail.includes(5));
/// assert!(Detail::parse("sometimes").is_err());
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Detail {
    /// Every step.
    Full,
    /// No step, unless a command requests it while the program runs.
    Off,
    /// The steps in these parts, and the step after a new peak or an OOM.
    Scheduled(Vec<Part>),
}

/// One of the comma-separated parts of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// From the first to the second step, inclusive.
    Steps(i32, i32),
    /// The steps that are multiples of this number.
    Every(i32),
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Part::Steps(first, last) if first == last => write!(f, "steps:{first}"),
            Part::Steps(first, last) => write!(f, "steps:{first}-{last}"),
            Part::Every(every) => write!(f, "every:{every}"),
        }
    }
}

impl fmt::Display for Detail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Detail::Full => f.write_str("full"),
            Detail::Off => f.write_str("off"),
            Detail::Scheduled(parts) if parts.is_empty() => f.write_str("peak"),
            Detail::Scheduled(parts) => {
                let parts: Vec<String> = parts.iter().map(Part::to_string).collect();
                f.write_str(&parts.join(","))
            }
        }
    }
}

impl Detail {
    /// Parses the value of the variable.
    ///
    /// # Errors
    /// Returns the accepted values if the given one is invalid.
    pub fn parse(value: &str) -> Result<Detail, String> {
        match value.to_ascii_lowercase().as_str() {
            "full" | "on" | "1" => Ok(Detail::Full),
            "off" | "0" => Ok(Detail::Off),
            list => {
                let words = list.split(',').map(str::trim).filter(|word| *word != "peak");
                Ok(Detail::Scheduled(words.map(part).collect::<Result<_, _>>()?))
            }
        }
    }

    /// Returns true if the schedule contains this step. Work before the first step has the detail of step 0.
    #[must_use]
    pub fn includes(&self, step: i32) -> bool {
        let step = step.max(0);
        match self {
            Detail::Full => true,
            Detail::Off => false,
            Detail::Scheduled(parts) => parts.iter().any(|part| match *part {
                Part::Steps(first, last) => (first..=last).contains(&step),
                Part::Every(every) => step % every == 0,
            }),
        }
    }

    /// Returns true if a new peak or an OOM makes the next step detailed. False for `full` and `off`, because
    /// the detail of a step never depends on these events there.
    #[must_use]
    pub fn follows_peaks(&self) -> bool {
        matches!(self, Detail::Scheduled(_))
    }
}

fn part(word: &str) -> Result<Part, String> {
    let step = |text: &str| text.trim().parse::<i32>().ok().filter(|step| *step >= 0);
    let found = match word.split_once(':') {
        Some(("steps", steps)) => {
            let (first, last) = steps.split_once('-').unwrap_or((steps, steps));
            match (step(first), step(last)) {
                (Some(first), Some(last)) if first <= last => Some(Part::Steps(first, last)),
                _ => None,
            }
        }
        Some(("every", number)) => step(number).filter(|every| *every > 0).map(Part::Every),
        _ => None,
    };
    found.ok_or_else(|| FORMS.to_owned())
}

/// The reason why a step is detailed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The schedule contains the step.
    Scheduled,
    /// A command requested the step while the program ran.
    Asked,
    /// Memory reached a new peak in the previous step.
    Peak,
    /// An allocation failed for lack of memory, in the previous step or earlier in this step.
    OutOfMemory,
}

/// A marker in the trace: the detail from this point on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DetailMark {
    /// Everything is recorded, for this reason.
    On(Reason),
    /// Only memory and phases are recorded.
    Off,
}

impl DetailMark {
    /// All markers.
    pub const ALL: [DetailMark; 5] = [
        DetailMark::On(Reason::Scheduled),
        DetailMark::On(Reason::Asked),
        DetailMark::On(Reason::Peak),
        DetailMark::On(Reason::OutOfMemory),
        DetailMark::Off,
    ];

    /// Returns the text of the marker's row.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            DetailMark::On(Reason::Scheduled) => "detail on: schedule",
            DetailMark::On(Reason::Asked) => "detail on: asked for",
            DetailMark::On(Reason::Peak) => "detail on: new peak",
            DetailMark::On(Reason::OutOfMemory) => "detail on: out of memory",
            DetailMark::Off => "detail off",
        }
    }

    /// Returns the marker with this text.
    #[must_use]
    pub fn parse(text: &str) -> Option<DetailMark> {
        DetailMark::ALL.into_iter().find(|mark| mark.as_str() == text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schedule_names_its_steps_and_prints_as_it_is_written() {
        for (value, shown, steps) in [
            ("full", "full", &[0, 1, 2, 3, 4, 5, 6][..]),
            ("off", "off", &[]),
            ("peak", "peak", &[]),
            ("steps:0-2", "steps:0-2", &[0, 1, 2]),
            ("steps:5", "steps:5", &[5]),
            ("Every:3", "every:3", &[0, 3, 6]),
            ("steps:1-2, every:5 ,peak", "steps:1-2,every:5", &[0, 1, 2, 5]),
        ] {
            let detail = Detail::parse(value).unwrap();
            assert_eq!(detail.to_string(), shown);
            assert_eq!((0..7).filter(|step| detail.includes(*step)).collect::<Vec<_>>(), steps, "{value}");
            assert_eq!(detail.includes(-1), detail.includes(0));
            assert_eq!(detail.follows_peaks(), !["full", "off"].contains(&value));
        }
    }

    #[test]
    fn a_schedule_that_makes_no_sense_is_refused_with_the_possible_values() {
        for bad in [
            "",
            ",",
            "some",
            "every",
            "every:",
            "every:0",
            "every:-1",
            "every:x",
            "steps:4-0",
            "steps:-1",
            "steps:1-",
            "every:99999999999",
            "steps:1,off",
            "full,every:5",
            "steps:1-2-3",
        ] {
            assert!(Detail::parse(bad).unwrap_err().contains("every:N"), "{bad}");
        }
    }

    #[test]
    fn the_marks_of_detail_come_back_from_their_texts() {
        for mark in DetailMark::ALL {
            assert_eq!(DetailMark::parse(mark.as_str()), Some(mark));
        }
        assert_eq!(DetailMark::parse("detail"), None);
    }
}
