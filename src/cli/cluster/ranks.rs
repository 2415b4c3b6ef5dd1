//! Parses and shows the ranks of `--ranks`: `0`, `0,7,511`, `0-3`, `first,last`, `all`.

use std::collections::BTreeSet;

use anyhow::{Result, bail};

/// The value of `--ranks` that names the first rank and one rank of each further stage of its pipeline.
pub(crate) const ONE_PER_STAGE: &str = "one-per-stage";

/// Returns the ranks that a list names, in a job of `world` ranks.
///
/// # Errors
/// When the list is empty or invalid, or names a rank that the job does not have.
pub(crate) fn parse(text: &str, world: u32) -> Result<BTreeSet<u32>> {
    let mut ranks = BTreeSet::new();
    for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
        let number = |word: &str| -> Result<u32> {
            let Some(rank) = word.parse::<u32>().ok().filter(|_| word.bytes().all(|b| b.is_ascii_digit()))
            else {
                bail!(
                    "--ranks {text}: `{}` is not a rank; expected numbers such as 0,7 or 0-3, or first, \
                     last, all, one-per-stage",
                    word.chars().take(40).collect::<String>()
                );
            };
            if rank >= world {
                bail!(
                    "--ranks {text}: there is no rank {rank}; the job has {}",
                    if world == 1 {
                        "one rank, 0".to_owned()
                    } else {
                        format!("{world} ranks, 0 to {}", world - 1)
                    }
                );
            }
            Ok(rank)
        };
        match word {
            "first" => drop(ranks.insert(0)),
            "last" => drop(ranks.insert(world - 1)),
            "all" => ranks.extend(0..world),
            ONE_PER_STAGE => {
                bail!(
                    "--ranks {text}: {ONE_PER_STAGE} cannot be combined with other ranks; it finds the ranks itself"
                )
            }
            _ => match word.split_once('-').filter(|(first, _)| !first.is_empty()) {
                Some((first, "")) => {
                    bail!("--ranks {text}: the range `{word}` has no end; write {first}-{} or all", world - 1)
                }
                Some((first, last)) => {
                    let (first, last) = (number(first.trim())?, number(last.trim())?);
                    if first > last {
                        bail!("--ranks {text}: the range `{word}` is empty; did you mean {last}-{first}?");
                    }
                    ranks.extend(first..=last);
                }
                None => drop(ranks.insert(number(word)?)),
            },
        }
    }
    if ranks.is_empty() {
        bail!("--ranks is empty; name the ranks to run, such as --ranks 0 or --ranks first,last");
    }
    Ok(ranks)
}

/// Returns ranks as a short list: `0,7,504-511`.
pub(crate) fn shown(ranks: &BTreeSet<u32>) -> String {
    let mut spans: Vec<(u32, u32)> = Vec::new();
    for &rank in ranks {
        match spans.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => spans.push((rank, rank)),
        }
    }
    let text = |&(first, last): &(u32, u32)| match last - first {
        0 => first.to_string(),
        _ => format!("{first}-{last}"),
    };
    spans.iter().map(text).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::{parse, shown};

    #[test]
    fn a_list_of_ranks_is_parsed_and_shown() {
        for (text, expected) in [
            ("0", "0"),
            (" 7, 0 ,511,", "0,7,511"),
            ("first,last", "0,511"),
            ("0-3,2-5", "0-5"),
            ("all", "0-511"),
            ("3,3", "3"),
        ] {
            assert_eq!(shown(&parse(text, 512).unwrap()), expected, "{text}");
        }
        assert_eq!(shown(&parse("first,last", 1).unwrap()), "0");
    }

    #[test]
    fn an_invalid_list_of_ranks_is_refused_with_the_reason() {
        for (text, part) in [
            ("", "--ranks is empty"),
            (" , ", "--ranks is empty"),
            ("512", "no rank 512; the job has 512 ranks, 0 to 511"),
            ("0,1000", "no rank 1000"),
            ("-1", "`-1` is not a rank"),
            ("one", "`one` is not a rank"),
            ("3-1", "did you mean 1-3?"),
            ("1-x", "`x` is not a rank"),
            ("3-", "the range `3-` has no end; write 3-511 or all"),
            ("+1", "`+1` is not a rank"),
            ("0,one-per-stage", "one-per-stage cannot be combined"),
            ("99999999999999", "is not a rank"),
        ] {
            let error = parse(text, 512).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
