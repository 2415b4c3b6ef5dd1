//! The simulated GPU that `--phantom` and its options request.

use anyhow::{Result, anyhow, bail};
use clap::ArgMatches;
use memtrace_cards::{LOADING_VARIABLE, Spec, parse_faults};
use memtrace_trace::counts::counted;

/// The simulated GPU that the command line requests.
pub(crate) struct PhantomArgs<'a> {
    /// The card, such as `h100-80g`.
    pub(crate) card: &'a str,
    pub(super) dynamic: Option<&'a str>,
    spec: Spec,
    /// The faults to inject, separated by commas.
    pub(super) faults: String,
    /// True if the program continues when the card is full.
    pub(super) goes_past_oom: bool,
    /// True if large CPU tensors keep their values.
    pub(super) keeps_host_values: bool,
}

impl<'a> PhantomArgs<'a> {
    /// Returns the values of `--phantom` and its options, or `None` without `--phantom`.
    ///
    /// # Errors
    /// When there is no such card; the message lists the cards.
    pub(crate) fn from_matches(matches: &'a ArgMatches) -> Result<Option<PhantomArgs<'a>>> {
        let card = matches.get_one::<String>("phantom");
        card.map(|card| PhantomArgs::of_card(matches, card)).transpose()
    }

    /// Returns the values for the card `card`, and the values of the other options for simulated GPUs.
    ///
    /// # Errors
    /// Same as [`PhantomArgs::from_matches`].
    pub(crate) fn of_card(matches: &'a ArgMatches, card: &'a str) -> Result<PhantomArgs<'a>> {
        let text = |name: &str| matches.get_one::<String>(name).map(String::as_str);
        let spec = Spec::parse(card).map_err(|error| anyhow!("--phantom {card}: {error}"))?;
        let eager = std::env::var_os(LOADING_VARIABLE).is_some_and(|value| value == "EAGER");
        let spec = if eager { spec.with_eager_loading() } else { spec };
        let faults: Vec<&str> =
            matches.get_many::<String>("phantom-fault").into_iter().flatten().map(String::as_str).collect();
        let faults = faults.join(",");
        let parsed = parse_faults(&faults).map_err(|error| anyhow!("--phantom-fault {error}"))?;
        let beyond = parsed.iter().find(|fault| fault.card.is_some_and(|number| number >= spec.count));
        if let Some(fault) = beyond {
            let (text, count) = (&fault.text, counted(u64::from(spec.count), "card"));
            bail!("--phantom-fault `{text}`: --phantom {card} has {count}; their numbers start at 0");
        }
        // Only `run` has these two options, so a missing option is not an error here.
        let is_set = |name| matches.try_get_one(name).ok().flatten().is_some_and(|is_set| *is_set);
        Ok(PhantomArgs {
            card,
            dynamic: text("phantom-dynamic"),
            spec,
            faults,
            goes_past_oom: is_set("past-oom"),
            keeps_host_values: !is_set("no-host-values"),
        })
    }

    /// Returns the number of cards in the request, such as 8 for `8xh100-80g`.
    pub(crate) fn count(&self) -> u64 {
        u64::from(self.spec.count)
    }

    /// Returns the total memory of the card in bytes.
    pub(crate) fn capacity(&self) -> u64 {
        self.spec.memory
    }

    /// Returns the free memory at the start, and the range that is expected on a real card.
    pub(crate) fn free_at_start(&self) -> FreeAtStart {
        let [here, least, most] = self.spec.free_at_start();
        FreeAtStart { here, least, most }
    }
}

/// The free memory at the start of a run, in bytes: `here` on this simulated GPU, and the range on a real
/// card.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FreeAtStart {
    pub(crate) here: u64,
    /// The lower end of the range that is expected on a real card.
    pub(crate) least: u64,
    /// The upper end of the range that is expected on a real card.
    pub(crate) most: u64,
}

impl std::fmt::Display for FreeAtStart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "free at the start: {} GiB", gib(self.here))?;
        if self.least == self.most {
            return Ok(());
        }
        write!(f, " ({} to {})", gib(self.least), gib(self.most))
    }
}

/// Formats bytes as GiB, without the unit.
pub(crate) fn gib(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / f64::from(1 << 30))
}

/// Checks the card of `--phantom`.
///
/// # Errors
/// When there is no such card; the message lists the cards.
pub(crate) fn check_card(card: &str) -> Result<()> {
    Spec::parse(card).map(|_| ()).map_err(|error| anyhow!("--phantom {card}: {error}"))
}
