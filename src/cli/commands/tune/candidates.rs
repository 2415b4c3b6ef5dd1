//! The settings of the caching allocator that `memtrace tune` tries.

use memtrace_analysis::requests::Requests;

/// The percentiles of the sizes of large requests that become values of `max_split_size_mb`. A percentile is
/// the size such that this percentage of the bytes is in requests of at most that size.
const QUANTILES: [i64; 3] = [25, 50, 90];
/// The number of bytes in the unit of `max_split_size_mb`.
const MIB: i64 = 1 << 20;

/// Returns the settings to try with the requests of a trace, the run's own settings first. Each is a value of
/// `PYTORCH_CUDA_ALLOC_CONF`; an empty value means the defaults.
///
/// The names come from PyTorch's documentation of that variable. `garbage_collection_threshold` has an effect
/// only if the program calls `torch.cuda.set_per_process_memory_fraction`, so it is not tried.
pub(super) fn candidates(own: &str, requests: &Requests) -> Vec<String> {
    let mut all = vec![own.to_owned(), String::new(), "expandable_segments:True".to_owned()];
    let splits: Vec<String> =
        split_sizes(&requests.large).iter().map(|size| format!("max_split_size_mb:{size}")).collect();
    all.extend(splits.iter().cloned());
    let powers = ["roundup_power2_divisions:4", "roundup_power2_divisions:16"];
    all.extend(powers.map(str::to_owned));
    all.push(format!("expandable_segments:True,{}", powers[1]));
    all.extend(splits.first().map(|split| format!("{split},{}", powers[1])));
    let mut seen = std::collections::HashSet::new();
    all.retain(|settings| seen.insert(settings.clone()));
    all
}

/// Returns the sizes at the [`QUANTILES`] of the large requests, in MiB, as values of `max_split_size_mb`.
/// The allocator never splits a block larger than this value, so such a block serves only large requests.
fn split_sizes(large: &[(i64, i64)]) -> Vec<i64> {
    let all: i64 = large.iter().map(|(_, sum)| sum).sum();
    let mut sizes: Vec<i64> = QUANTILES
        .iter()
        .filter_map(|quantile| {
            let mut below = 0;
            let (size, _) = large.iter().find(|(_, sum)| {
                below += sum;
                below >= all / 100 * quantile
            })?;
            // PyTorch rejects values of 20 MiB or less.
            Some((size / MIB).max(21))
        })
        .collect();
    sizes.dedup();
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tune_tries_the_runs_own_settings_first_and_each_once() {
        let requests =
            Requests { large: vec![(30 * MIB, 300 * MIB), (400 * MIB, 800 * MIB)], ..Requests::default() };
        let all = candidates("expandable_segments:True", &requests);
        assert_eq!(all[0], "expandable_segments:True");
        assert_eq!(all.iter().filter(|one| *one == &all[0]).count(), 1);
        assert!(
            all.contains(&"max_split_size_mb:30".to_owned())
                && all.contains(&"max_split_size_mb:400".to_owned())
        );
    }

    #[test]
    fn tune_tries_no_split_size_when_no_request_is_large() {
        let all = candidates("", &Requests::default());
        assert!(all.iter().all(|one| !one.contains("max_split_size_mb")), "{all:?}");
    }
}
