//! `memtrace advise` with a change, such as `--batch x2`: predicts the peak of allocated memory of the
//! changed program.

use serde_json::{Value, json};

use super::super::report::{Answer, Needs, Report, next};
use super::{failed_request, print_code};
use crate::error::Result;
use crate::options::{Flag, Options};
use crate::read::input::Input;
use crate::read::symbols::{NO_MODULE, NO_OP, NO_PHASE};
use crate::render::footer::Footer;
use crate::render::heading::process_heading;
use crate::render::numbers::{percent, share, step_or_dash, upper_first};
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::state::device::Peak;
use crate::state::replay_trace::Replayed;
use crate::whatif::{self, Change, ENDED_IN_OOM, Prediction, advice, sureness_in};

/// `memtrace advise` with a change.
pub(super) struct AdviseChange;

const fn flag(name: &'static str, value: &'static str, help: &'static str) -> Flag {
    Flag { name, value: Some(value), default: "", choices: &[], help }
}

/// The options for the changes. Each of them selects this report.
pub(super) const CHANGES: &[Flag] = &[
    flag("checkpoint", "MODULES", "Checkpoint the modules that match this pattern, such as 'GPT.h.*'"),
    flag(
        "optimizer",
        "NAME",
        "Use this optimizer (8bit, adafactor or sgd), step in the backward (in-backward), or both: 8bit,in-backward",
    ),
    flag("offload", "WHAT", "Offload to host memory: optimizer (its state and its step)"),
    flag("autocast", "TYPE", "Run the forward under torch.autocast to this type: bf16 or fp16"),
    flag("dtype", "TYPE", "Train in this type instead of float32: bf16 or fp16"),
    flag("chunk-loss", "N", "Run the head and the loss on N parts of the tokens, one after the other"),
    flag("batch", "FACTOR", "Multiply the batch: x2, x1/2"),
    flag(
        "shard",
        "N",
        "Divide parameters, gradients and optimizer state over N ranks (FSDP2); 8:optimizer divides only \
         the optimizer state",
    ),
    flag(
        "without",
        "CONDITIONS",
        "Leave out the blocks that match all of these conditions, such as \
                                   'category=temporary,op=aten::_foreach*'",
    ),
];

impl Report for AdviseChange {
    fn name(&self) -> &'static str {
        "advise --batch x2"
    }

    fn about(&self) -> &'static str {
        "Predict the peak with a change"
    }

    fn flags(&self) -> &'static [Flag] {
        const {
            &[
                Flag::switch(
                    "reserved",
                    "Also predict reserved memory: replay the changed requests with PyTorch's own allocator",
                ),
                flag(
                    "python",
                    "PATH",
                    "The Python whose PyTorch replays the requests of --reserved [default: python3]",
                ),
            ]
        }
    }

    fn needs(&self, options: &Options) -> Result<Needs> {
        Ok(Needs { reserved: options.is_set("reserved"), ..Needs::default() })
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let input = &inputs[0];
        let parsed = whatif::parse(|name| options.text(name))?;
        let mut printer = options.printer();
        let mut footer = Footer::of([input]);
        let mut json = Vec::new();
        for (index, trace) in input.traces.iter().enumerate() {
            let changes = whatif::with_units(trace, &parsed, options)?;
            // Predict the effect of all changes together and, if there are several, of each change alone.
            let mut lists = vec![changes.clone()];
            if changes.len() > 1 {
                lists.extend(changes.iter().map(|change| vec![change.clone()]));
            }
            let (replayed, predictions) = whatif::predict(trace, &lists, options)?;
            let fullest = predictions.iter().max_by_key(|each| (each.before.bytes, -each.device));
            let fullest = fullest.map(|each| each.device);
            footer.add_with_device(trace, &replayed, fullest);
            process_heading(&mut printer, input, index);
            for prediction in &predictions {
                footer.notes.extend(prediction.cut_note());
                print(&mut printer, &replayed, prediction, &changes, options);
                let mut value = of_device(&replayed, prediction, &changes);
                value["file"] = trace.path.display().to_string().into();
                value["rank"] = trace.meta.rank.into();
                json.push(value);
            }
            if predictions.is_empty() {
                printer.plain("No block was allocated on a device.");
            }
        }
        Ok(Answer {
            next: vec![next("peak", input, "--by category")],
            ..Answer::new(printer, json!({ "devices": json }), footer)
        })
    }
}

/// Adds a row to the table: the peak in `moment`, the bytes that it saves compared with `before`, and its
/// owner.
fn row(table: &mut Table, name: String, replayed: &Replayed, moment: &Peak, before: i64, options: &Options) {
    let saved = before.wrapping_sub(moment.bytes);
    let owner = &moment.owner;
    table.row([
        name.into(),
        Cell::new(options.units.show(moment.bytes).to_string(), Style::Strong),
        options.units.show(saved).to_string().into(),
        step_or_dash(owner.step).into(),
        replayed.symbols.or(owner.phase, NO_PHASE).into(),
        replayed.symbols.or(owner.op, NO_OP).into(),
        replayed.symbols.or(owner.module, NO_MODULE).into(),
    ]);
}

fn print(
    printer: &mut Printer,
    replayed: &Replayed,
    prediction: &Prediction,
    changes: &[Change],
    options: &Options,
) {
    let before = prediction.before.bytes;
    let Some(all) = prediction.outcomes.first() else { return };
    let saved = before.wrapping_sub(all.peak.bytes);
    let direction = if saved >= 0 { "less" } else { "more" };
    let with_failed = failed_request(replayed, prediction)
        .map(|bytes| format!(" ({} and the request that failed)", options.units.show(before - bytes)));
    printer.line([
        format!("device {}: peak of allocated memory ", prediction.device).into(),
        Cell::new(options.units.show(all.peak.bytes).to_string(), Style::Strong),
        format!(
            " instead of {}{}, {} {direction} ({})",
            options.units.show(before),
            with_failed.unwrap_or_default(),
            options.units.show(saved.abs()),
            percent(share(saved.abs(), before))
        )
        .into(),
    ]);
    if replayed.replay.ended_in_oom() {
        printer.plain(format!("{}.", upper_first(ENDED_IN_OOM)));
    }
    printer.gap();
    let mut table = Table::new(&[
        ("change", Side::Left),
        ("peak", Side::Right),
        ("saved", Side::Right),
        ("step", Side::Right),
        ("phase", Side::Left),
        ("op", Side::Left),
        ("module", Side::Left),
    ]);
    row(&mut table, "(none)".to_owned(), replayed, &prediction.before, before, options);
    for (change, outcome) in changes.iter().zip(prediction.outcomes.iter().skip(1)) {
        row(&mut table, change.option(), replayed, &outcome.peak, before, options);
    }
    let name = if changes.len() > 1 { "all of them".to_owned() } else { changes[0].option() };
    row(&mut table, name, replayed, &all.peak, before, options);
    printer.table(&table);
    printer.gap();
    for (change, found) in changes.iter().zip(&all.found) {
        let about = sureness_in(change, &replayed.replay);
        printer.line([
            Cell::new(change.option(), Style::Strong),
            format!(": sure: {}, because {}", about.word, about.because).into(),
        ]);
        printer.plain(format!("  assumes {}", about.assumes));
        let is_half_already = prediction.has_already(change);
        if *found == 0 || is_half_already {
            let why = if is_half_already { HALF_ALREADY } else { nothing(change) };
            printer.line([Cell::new(format!("  {why}"), Style::Alarm)]);
        }
    }
    for (change, found) in changes.iter().zip(&all.found) {
        let advice = advice(change, &all.again);
        if *found > 0 && !advice.code.is_empty() {
            print_code(printer, change, &advice);
        }
    }
    printer.gap();
    printer.plain("These figures are allocated memory. With --reserved, the changed requests are replayed for reserved memory, too.");
}

/// The text in place of a prediction for a change to 16 bits, if the run computes in 16 bits already.
const HALF_ALREADY: &str =
    "nothing to gain: the parameters have 16 bits or fewer, or the forward runs under autocast already";

/// Returns the text for a change that changes no block of this trace, with the reason.
fn nothing(change: &Change) -> &'static str {
    match change {
        Change::Checkpoint(_) => {
            "nothing changes: no call of these modules keeps blocks for a backward (they are checkpointed already, or nothing \
             is trained)"
        }
        Change::Optimizer(_) | Change::OffloadOptimizer | Change::ShardOptimizer(_) => {
            "nothing changes: the trace has no optimizer state on the device"
        }
        Change::StepInBackward => "nothing changes: the trace has no gradients",
        Change::Shard { .. } => "nothing changes: the trace has no parameters",
        Change::ChunkLoss(_) => "nothing changes: no forward calls aten::cross_entropy_loss",
        Change::Autocast => "nothing changes: no op of its forward runs in 16 bits under autocast",
        Change::Bfloat16 | Change::Batch(..) | Change::Without(_) => "nothing changes: no block matches",
    }
}

fn of_device(replayed: &Replayed, prediction: &Prediction, changes: &[Change]) -> Value {
    let all = prediction.outcomes.first();
    let each: Vec<Value> = changes
        .iter()
        .enumerate()
        .map(|(index, change)| {
            let about = sureness_in(change, &replayed.replay);
            let alone = if changes.len() > 1 { prediction.outcomes.get(index + 1) } else { all };
            json!({
                "change": change.option(),
                "found": all.map(|all| all.found[index]),
                "peak_alone": alone.map(|outcome| replayed.moment(&outcome.peak)),
                "assumes": about.assumes,
                "sure": about.word,
                "because": about.because,
            })
        })
        .collect();
    json!({
        "device": prediction.device,
        "before": replayed.moment(&prediction.before),
        "after": all.map(|all| replayed.moment(&all.peak)),
        "is_lower_bound": replayed.replay.ended_in_oom(),
        "saved_bytes": all.map(|all| prediction.before.bytes.wrapping_sub(all.peak.bytes)),
        "changes": each,
    })
}
