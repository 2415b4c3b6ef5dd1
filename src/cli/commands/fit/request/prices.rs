//! `--prices`: a file with the price of each card, by which the rows of the answer are sorted.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, bail};
use clap::{Arg, ArgMatches, value_parser};

use super::placeholders;

/// The size in bytes of the largest file that is read.
const MOST_BYTES: u64 = 1 << 20;

/// Returns the option `--prices`.
pub(crate) fn argument() -> Arg {
    Arg::new("prices")
        .long("prices")
        .value_name("FILE")
        .value_parser(value_parser!(PathBuf))
        .requires("phantom")
        .help(
            "Sort the rows by price, the cheapest first. Each line of FILE has a card and the price of one, in any \
             unit: rtx4090,0.35",
        )
}

/// The price of one GPU of each card.
#[derive(Debug)]
pub(crate) struct Prices(Vec<(String, f64)>);

impl Prices {
    /// Returns the prices of the option, or `None` without the option.
    ///
    /// # Errors
    /// When the file cannot be read, or has a line without a card and a price.
    pub(crate) fn new(matches: &ArgMatches) -> Result<Option<Prices>> {
        let Some(file) = matches.get_one::<PathBuf>("prices") else { return Ok(None) };
        let shown = file.display();
        // A device such as /dev/zero has no size and no end.
        let mut text = String::new();
        let start = File::open(file).map(|file| file.take(MOST_BYTES + 1));
        start
            .and_then(|mut start| start.read_to_string(&mut text))
            .with_context(|| format!("--prices {shown}"))?;
        if text.len() as u64 > MOST_BYTES {
            bail!("--prices {shown}: more than {MOST_BYTES} bytes are too many for a list of prices");
        }
        Prices::parse(&text).map(Some).map_err(|error| anyhow!("--prices {shown}: {error}"))
    }

    /// Parses lines such as `rtx4090,0.35`. Blank lines, comments (`#`) and a first line with the names of columns are
    /// left out.
    fn parse(text: &str) -> Result<Prices> {
        let mut prices = Vec::new();
        let mut is_first = true;
        // A spreadsheet may write a byte order mark.
        let lines = text.trim_start_matches('\u{feff}').lines().map(str::trim).enumerate();
        for (at, line) in lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')) {
            let parts = line.split_once(',').map(|(card, price)| (card.trim(), price.trim()));
            let is_header = std::mem::take(&mut is_first)
                && parts.is_some_and(|(_, price)| !price.contains(|c: char| c.is_ascii_digit()));
            let price = parts.and_then(|(_, price)| price.parse::<f64>().ok());
            match (parts, price.filter(|price| price.is_finite() && *price >= 0.0)) {
                (Some((card, _)), Some(price)) if !card.is_empty() => {
                    prices.push((card.to_lowercase(), price))
                }
                _ if is_header => {}
                _ => bail!("line {}: expected a card and its price, such as rtx4090,0.35", at + 1),
            }
        }
        if prices.is_empty() {
            bail!("no line has a card and its price, such as rtx4090,0.35");
        }
        Ok(Prices(prices))
    }

    /// Returns the price of `gpus` GPUs of a card such as `h100-80g`, `2xh100-80g` or `h100-80g,mem=40g`. Without
    /// `gpus`, the card has the number. Returns `None` if the file lacks the card.
    pub(crate) fn price(&self, card: &str, gpus: Option<u64>) -> Option<f64> {
        let (count, preset) = placeholders::count_and_preset(card)?;
        let (_, price) = self.0.iter().find(|(known, _)| preset.eq_ignore_ascii_case(known))?;
        Some(price * gpus.unwrap_or(count) as f64)
    }
}

/// Returns the text of a price. It has at most two decimals, or if it is below 0.1, two significant digits.
pub(crate) fn price_text(price: f64) -> String {
    let first_digit = if price > 0.0 { -price.log10().floor() } else { 0.0 };
    let decimals = if first_digit > 1.0 { first_digit as usize + 1 } else { 2 };
    let text = format!("{price:.decimals$}");
    let text = if decimals > 2 { text.trim_end_matches('0') } else { &text };
    text.strip_suffix(".00").unwrap_or(text).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_price_keeps_its_digits() {
        for (price, text) in [
            (0.0, "0"),
            (2.0, "2"),
            (0.35, "0.35"),
            (16.5, "16.50"),
            (1024.0, "1024"),
            (0.035, "0.035"),
            (0.01, "0.01"),
            (0.0001, "0.0001"),
            (0.000_123, "0.00012"),
        ] {
            assert_eq!(price_text(price), text);
        }
    }

    #[test]
    fn the_price_of_several_gpus_is_a_multiple() {
        let prices = Prices::parse(
            "\u{feff}# of today\ncard,price per hour\n# a comment\n\nrtx4090, 0.35\nH100-80g,2\n",
        )
        .unwrap();
        assert_eq!(prices.price("rtx4090", None), Some(0.35));
        assert_eq!(prices.price("8xh100-80g", None), Some(16.0));
        assert_eq!(prices.price("h100-80g", Some(4)), Some(8.0));
        assert_eq!(prices.price("h100-80g,count=8", None), Some(16.0));
        assert_eq!(prices.price("512XH100-80g", None), Some(1024.0));
        // A card that has no preset has no price.
        assert_eq!(prices.price("mem=80g", None), None);
        assert_eq!(prices.price("RTX4090,mem=20g", None), Some(0.35));
        assert_eq!(prices.price("l40s", None), None);
    }

    #[test]
    fn a_file_without_an_end_is_refused() {
        let words = "fit --phantom l4 --prices /dev/zero -- python t.py {}";
        let matches = crate::commands::fit::command().try_get_matches_from(words.split(' ')).unwrap();
        let error = Prices::new(&matches).unwrap_err().to_string();
        assert!(error.contains("too many for a list of prices"), "{error}");
    }

    #[test]
    fn a_file_without_prices_is_refused() {
        for (text, part) in [
            ("", "no line has a card"),
            ("card,price\n", "no line has a card"),
            ("rtx4090,$0.35\nl4,1\n", "line 1: expected a card"),
            ("rtx4090,1\nl4;2\n", "line 2: expected a card"),
            ("rtx4090,1\nl4,cheap\n", "line 2: expected a card"),
            ("rtx4090,1\nl4,-2\n", "line 2: expected a card"),
            ("rtx4090,1\nl4,inf\n", "line 2: expected a card"),
            ("rtx4090,1\n,2\n", "line 2: expected a card"),
        ] {
            let error = Prices::parse(text).expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
