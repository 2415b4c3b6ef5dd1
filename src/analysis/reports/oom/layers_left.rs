//! The repeated layers that a forward had not reached at an OOM, and an estimate of their memory.

use std::collections::BTreeMap;

use memtrace_trace::Category;

use crate::state::module_layers::Layers;

/// The repeated layers that a forward had not reached when it ran out of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LayersLeft {
    /// The layer of the request, its number (from 0), and the number of all layers, such as `Net.blocks.10`,
    /// 10 and 12.
    pub(super) at: String,
    pub(super) number: i64,
    pub(super) of: i64,
    /// An estimate of the bytes that the current layer and the remaining layers would still allocate: the
    /// average of the earlier layers for each, minus the memory that the current layer already holds. In the
    /// first layer, and after earlier layers of unlike sizes, this is unknown and 0.
    pub(super) bytes: i64,
}

impl LayersLeft {
    /// Returns the layers that were not complete at the request in `module`. Their memory is estimated from
    /// the blocks of the layers before. Returns `None` if `module` is not in a repeated layer. `live` has the
    /// module, category and bytes of each live block.
    pub(super) fn find(
        module: &str,
        layers: &Layers,
        live: &[(String, Category, i64)],
    ) -> Option<LayersLeft> {
        let joined = layers.joined(module);
        let mut end = 0;
        for (name, joined) in module.split('.').zip(joined.split('.')) {
            let prefix = &module[..end];
            end += name.len() + 1;
            let Some(at) = name.parse::<i64>().ok().filter(|_| joined == "*") else { continue };
            let number = |path: &str| path.strip_prefix(prefix)?.split('.').next()?.parse::<i64>().ok();
            let of = live.iter().filter_map(|(path, ..)| number(path)).max()? + 1;
            let kept = live.iter().filter(|(path, category, _)| {
                number(path).is_some_and(|number| number < at)
                    && matches!(
                        category,
                        Category::Activation | Category::Temporary | Category::AutogradDetail
                    )
            });
            let mut of_earlier: BTreeMap<i64, i64> = BTreeMap::new();
            for (path, _, bytes) in kept {
                *of_earlier.entry(number(path).unwrap_or_default()).or_default() += bytes;
            }
            let found = |bytes| LayersLeft { at: format!("{prefix}{name}"), number: at, of, bytes };
            if at == 0 && of > 1 {
                return Some(found(0));
            }
            if of > at {
                let Some(each) = mean_if_alike(at, &of_earlier) else {
                    return (of > at + 1).then(|| found(0));
                };
                // The layer of the request already holds a part of its memory, which must not be counted
                // again.
                let taken: i64 = live
                    .iter()
                    .filter(|(path, category, _)| {
                        number(path) == Some(at) && category.without_sharding() != Category::Parameter
                    })
                    .map(|(.., bytes)| bytes)
                    .sum();
                let left = each * (of - at) - taken;
                return (left > 0).then(|| found(left));
            }
        }
        None
    }
}

/// Returns the mean of the bytes of `count` layers, or `None` if the largest has more than twice as much as the
/// smallest: the stages of a convolutional network, each of which works on a smaller image, do not predict the
/// next one. `layers` has the bytes of the layers that hold memory, by number.
fn mean_if_alike(count: i64, layers: &BTreeMap<i64, i64>) -> Option<i64> {
    let (least, most) = (layers.values().min()?, layers.values().max()?);
    let are_all = layers.len() as i64 == count;
    (are_all && *most <= 2 * least).then(|| layers.values().sum::<i64>() / count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oom_predicts_no_layer_from_layers_of_unlike_sizes() {
        let mean = |count, layers: &[i64]| mean_if_alike(count, &(0..).zip(layers.iter().copied()).collect());
        assert_eq!(mean(3, &[100, 110, 120]), Some(110));
        assert_eq!(mean(1, &[100]), Some(100));
        // The stages of EfficientNet: the second has most of the memory, and the later ones have less.
        assert_eq!(mean(2, &[1200, 7600]), None);
        // Two of three layers hold no memory.
        assert_eq!(mean(3, &[100]), None);
        assert_eq!(mean(2, &[]), None);
    }
}
