//! The answers of `memtrace fit --json`, for one search and for several.

use serde_json::{Value, json};

use super::single_search::{Answer, vllm_options};
use super::table::shown;
use crate::commands::fit::recipe::prepared::PreparedRecipe;
use crate::commands::fit::request::mode::Goal;
use crate::commands::fit::request::plan::Plan;
use crate::commands::fit::search::row_search::RowSearch;
use crate::commands::fit::trial::outcome::{Trial, TrialOutcome};

/// Returns the answer of one search.
pub(crate) fn of_one(answer: &Answer<'_>, recipe: Option<&PreparedRecipe>) -> Value {
    let Answer { search, plan } = answer;
    let found = search.fits().zip(search.row.length);
    let settings = recipe.zip(found).map(|(recipe, (trial, length))| recipe.settings(&trial.value, length));
    let value = |trial: Option<&Trial>| trial.map(|trial| trial.value.clone());
    let trials: Vec<Value> = answer.trials().map(trial_json).collect();
    json!({
        "report": "fit",
        "command": plan.command_of(search.row),
        "wanted": wanted(plan.goal),
        "phantom": answer.device().is_some_and(|peak| peak.phantom),
        "device": answer.device().map(|peak| peak.device.clone()),
        "capacity_bytes": answer.device().map_or(0, |peak| peak.capacity),
        "fits": value(search.fits()),
        "too_big": value(search.too_big()),
        "values_between": answer.has_gap(),
        "disorder": search.disorder(),
        "inside_range": answer.inside_range().iter().map(|trial| &trial.value).collect::<Vec<_>>(),
        "free_at_start_bytes": search.row.free_at_start.map(|free| free.here),
        "free_at_start_range_bytes": search.row.free_at_start.map(|free| [free.least, free.most]),
        "spare_bytes": search.fits().map(|trial| (trial.peak.capacity - trial.peak.used).max(0)),
        "price": answer.price(),
        "stopped": search.stopped,
        "value_name": answer.recipe_value(),
        "settings": settings,
        "flags": recipe.and_then(|recipe| vllm_options(search, recipe)),
        "trials": trials,
        "next": answer.next(),
    })
}

fn trial_json(trial: &Trial) -> Value {
    let peak = &trial.peak;
    let held: serde_json::Map<String, Value> =
        peak.by_category.iter().map(|(name, bytes)| (name.clone(), (*bytes).into())).collect();
    let (asked, ended, tail) = match &trial.outcome {
        TrialOutcome::Fits => (None, None, None),
        TrialOutcome::TooBig(asked) | TrialOutcome::TooBigForHost(asked) => (Some(asked), None, None),
        TrialOutcome::Failed(ended, tail) => (None, Some(ended), Some(tail)),
    };
    json!({
        "value": trial.value,
        "outcome": trial.outcome.word(),
        "asked": asked,
        "ended": ended,
        "stderr_tail": tail,
        "inside_range": peak.inside_range,
        "peak_allocated_bytes": peak.allocated,
        "peak_reserved_bytes": peak.reserved,
        "peak_used_bytes": peak.used,
        "peak_host_bytes": peak.host,
        "retries": peak.retries,
        "processes": peak.processes,
        "at_peak_by_category_bytes": held,
        "seconds": trial.took.as_secs_f64(),
        "folder": trial.existing_folder(),
    })
}

/// Returns the answers of several searches, a row each.
pub(crate) fn of_several(plan: &Plan, searches: &[RowSearch<'_>], recipe: Option<&PreparedRecipe>) -> Value {
    let rows: Vec<Value> = shown(plan, searches)
        .into_iter()
        .map(|search| {
            let mut row = of_one(&Answer { search, plan }, recipe);
            if let Some(fields) = row.as_object_mut() {
                ["report", "command", "wanted"].iter().for_each(|name| drop(fields.remove(*name)));
                fields.insert("card".to_owned(), plan.card_of(search.row).into());
                fields.insert("gpus".to_owned(), search.row.gpus.into());
                if let Some(length) = search.row.length {
                    // `tokens` is the older name, which is wrong for images.
                    fields.insert("tokens".to_owned(), length.into());
                    fields.insert("length".to_owned(), length.into());
                }
                let (fits, too_big) = limits_json(plan, search);
                fields.insert("fits".to_owned(), fits);
                fields.insert("too_big".to_owned(), too_big);
            }
            row
        })
        .collect();
    let command: Vec<String> = plan.words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    json!({ "report": "fit", "command": command, "wanted": wanted(plan.goal), "rows": rows })
}

fn wanted(goal: Goal) -> &'static str {
    match goal {
        Goal::Largest => "value",
        Goal::Smallest => "smallest",
        Goal::FewestGpus => "gpus",
        Goal::YesOrNo => "fits",
    }
}

/// Returns the last value that fits and the first that does not, or null. They may follow from other rows. If
/// no value is searched for, returns whether the program fits (null if unknown), and null.
fn limits_json(plan: &Plan, search: &RowSearch<'_>) -> (Value, Value) {
    let text = |index: Option<usize>| Value::from(index.map(|index| search.values.text(index)));
    match (plan.goal, search.limit.fits, search.limit.too_big) {
        (Goal::YesOrNo, None, None) => (Value::Null, Value::Null),
        (Goal::YesOrNo, fits, _) => (fits.is_some().into(), Value::Null),
        (_, fits, too_big) => (text(fits), text(too_big)),
    }
}
