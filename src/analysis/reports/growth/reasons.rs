//! The reason and the remedy for the growth of each part, in words.

use memtrace_trace::units::Unit;

use super::LevelGrowth;
use super::cache_holders::FreePlaces;
use super::needs::Shape;
use super::part::GrowthPart;
use crate::render::numbers::{count, counted};

/// The location of most of the free memory, separate from the pool that most requests use: pools of CUDA
/// graphs, other private pools, or other streams. The fields are the bytes and the number of these pools or
/// streams.
enum Apart {
    Graphs(i64, usize),
    Pools(i64, usize),
    Streams(i64, usize),
}

/// The remedy for one step that is larger than the others.
const CROP_ONE: &str = "crop, split or skip inputs as large as this step's; run the largest batch first";
/// The remedy for steps of various sizes.
const CROP_LONGEST: &str =
    "crop the longest input, or limit the total length of a batch; run the largest batch first";

impl LevelGrowth {
    /// Returns the reason for the growth of a part, in one or two sentences.
    pub(super) fn why(&self, part: GrowthPart, units: Unit) -> String {
        let show = |bytes: i64| units.show(bytes).to_string();
        match part {
            GrowthPart::Kept if self.is_once() => {
                "It was allocated once and stays, as the state of an optimizer does; it does not grow further.".to_owned()
            }
            GrowthPart::Kept if self.changes.in_part(GrowthPart::Kept).is_empty() && !self.measured.is_by_time() => {
                "The memory that a step still holds at its end varies in size; no memory of earlier steps \
                 is left.".to_owned()
            }
            GrowthPart::Kept if self.is_replaced() => {
                "What a step keeps is its own, and more than the step before kept: a variable of the loop, or \
                 x = torch.cat([x, new]).".to_owned()
            }
            GrowthPart::Kept => match self.measured.falls() {
                Some((count, last)) => format!(
                    "Each step allocates memory that is freed only later: kept memory fell {}, the last time in {}.",
                    counted(count as u64, "time"),
                    self.measured.name_of(last)
                ),
                None if self.measured.has_stopped() => {
                    "Each step allocates memory that later steps free, as with a buffer of limited size: kept memory \
                     hardly grew in the last quarter of the run.".to_owned()
                }
                None => "Each step allocates memory that is not freed.".to_owned(),
            },
            GrowthPart::LargerSteps if self.measured.is_of_kept() => {
                format!(
                    "No step needs much more than before. Kept memory was highest in {}, and part of it has been \
                     freed since.",
                    self.measured.name_of(self.measured.largest().0)
                )
            }
            GrowthPart::LargerSteps => {
                let (highest, need) = self.measured.largest();
                let first = self.measured.first();
                let shape = match self.measured.shape() {
                    Shape::Rising => "The steps get larger",
                    Shape::OneLarge => "One step is larger than the others",
                    Shape::Varying => "Steps differ in size, and the largest one sets the peak",
                };
                let mut text = format!(
                    "{shape}: {} needed {} beyond what it kept, {} needs {}.",
                    self.measured.name_of(first),
                    show(self.measured.first_need()),
                    self.measured.name_of(highest),
                    show(need)
                );
                if self.is_joined() {
                    text.push_str(" Most of it is results that are joined outside the model.");
                } else if first.inputs > 0 && 2 * highest.inputs > 3 * first.inputs {
                    text.push_str(&format!(
                        " Its inputs are {:.1} times as large ({}, before {}).",
                        highest.inputs as f64 / first.inputs as f64,
                        show(highest.inputs),
                        show(first.inputs)
                    ));
                }
                text
            }
            GrowthPart::Cached => {
                let (all, once) = self.sizes;
                if let Some(text) = self.why_apart(units) {
                    text
                } else if self.is_joined() {
                    "Results are joined outside the model, and each join needs a larger block than the last, so freed \
                     blocks rarely fit the next request.".to_owned()
                } else if all > 16 && 2 * once > all {
                    let rising = self.measured.shape() == Shape::Rising;
                    format!(
                        "{}: {} different sizes of at least 1 MiB, {} of them in a single step{}, so freed blocks rarely \
                         fit the next request.",
                        if rising { "Each step asks for larger blocks" } else { "Sizes vary" },
                        count(all as u64),
                        count(once as u64),
                        self.of_ops()
                    )
                } else {
                    "Free memory in the allocator's segments did not fit later requests.".to_owned()
                }
            }
            GrowthPart::Outside => {
                let (first, last) = (self.measured.first(), self.measured.last());
                let (others, context) = (last.others - first.others, last.context - first.context);
                let traced = self.measured.bytes_of(GrowthPart::Outside) - others - context;
                let most = others.max(context).max(traced);
                if most == others {
                    format!("Other processes on this GPU took {} more; memtrace ledger names them.", show(others))
                } else if most == context {
                    format!(
                        "The CUDA context took {} more: kernels that are loaded at their first use, or workspaces of libraries.",
                        show(context)
                    )
                } else {
                    format!("Libraries and direct calls of CUDA took {} more.", show(traced))
                }
            }
        }
    }

    /// Returns the reason why cached memory is separate from the allocator's other memory: it is in pools of
    /// CUDA graphs, in other private pools, or on other streams. Returns `None` if no such place has at least
    /// half of the free memory.
    fn why_apart(&self, units: Unit) -> Option<String> {
        let text = match self.apart()? {
            Apart::Graphs(bytes, pools) => format!(
                "{} of free memory is in {} of CUDA graphs, which no other graph or op uses.",
                units.show(bytes),
                counted(pools as u64, "private pool")
            ),
            Apart::Pools(bytes, pools) => format!(
                "{} of free memory is in {}: of CUDA graphs of torch.compile, or a torch.cuda.MemPool.",
                units.show(bytes),
                counted(pools as u64, "private pool")
            ),
            Apart::Streams(bytes, streams) => format!(
                "{} of free memory belongs to {}: a freed block serves only the stream that it was allocated on.",
                units.show(bytes),
                counted(streams as u64, "other stream")
            ),
        };
        Some(text)
    }

    /// Returns the kind of place that holds at least half of the free memory, or `None` if no kind does.
    fn apart(&self) -> Option<Apart> {
        let FreePlaces { all, graphs, pools, streams } = self.free;
        let is_most = |bytes: i64| bytes > 0 && 2 * bytes >= all;
        if is_most(graphs.0) {
            Some(Apart::Graphs(graphs.0, graphs.1))
        } else if is_most(pools.0) {
            Some(Apart::Pools(pools.0, pools.1))
        } else {
            is_most(streams.0).then_some(Apart::Streams(streams.0, streams.1))
        }
    }

    /// Returns the text for the ops that allocated most of the sizes that occur in only one step, such as `
    /// (aten::mm 12)` with the number of these sizes. Empty if no op is known.
    fn of_ops(&self) -> String {
        let ops: Vec<String> =
            self.size_ops.iter().map(|(op, sizes)| format!("{op} {}", count(*sizes as u64))).collect();
        if ops.is_empty() { String::new() } else { format!(" ({})", ops.join(", ")) }
    }

    /// Returns a remedy for the growth of a part.
    pub(super) fn remedy(&self, part: GrowthPart) -> String {
        let remedy = self.remedy_of(part);
        if self.trains && [CROP_ONE, CROP_LONGEST].contains(&remedy) {
            format!("{remedy}; validation: torch.no_grad()")
        } else {
            remedy.to_owned()
        }
    }

    fn remedy_of(&self, part: GrowthPart) -> &'static str {
        match part {
            GrowthPart::Kept if self.is_once() => "nothing, unless this memory is not needed",
            GrowthPart::Kept
                if self.changes.in_part(GrowthPart::Kept).is_empty() && !self.measured.is_by_time() =>
            {
                "del the step's variables at its end if the next step runs out of memory"
            }
            GrowthPart::Kept if self.is_replaced() => {
                "del the variable at the end of the step; keep a buffer of fixed size, or its pieces on the CPU"
            }
            GrowthPart::Kept if self.measured.falls().is_none() && self.measured.has_stopped() => {
                "nothing if this level fits, or else a smaller limit for what is kept"
            }
            GrowthPart::Kept => "memtrace leaks --holders names the list, closure or graph that keeps it",
            GrowthPart::LargerSteps if self.is_kept_at_oom => {
                "memtrace oom names what this step keeps without need, and how to free it"
            }
            GrowthPart::LargerSteps
                if self.measured.is_of_kept() && self.measured.growing().contains(&GrowthPart::Kept) =>
            {
                "see kept: the same memory serves it again"
            }
            GrowthPart::LargerSteps if self.measured.is_of_kept() => {
                "keep less at a time: what waits in a queue needs a limit"
            }
            GrowthPart::LargerSteps if self.is_joined() => {
                "move results to the CPU before they are joined (transformers: eval_accumulation_steps)"
            }
            GrowthPart::LargerSteps => match self.measured.shape() {
                Shape::Rising => {
                    "limit the length or the number of inputs; plan for the largest: memtrace advise"
                }
                Shape::OneLarge => CROP_ONE,
                Shape::Varying => CROP_LONGEST,
            },
            GrowthPart::Cached if matches!(self.apart(), Some(Apart::Graphs(..))) => {
                "fewer captured shapes (pad to a few sizes), and one pool for all graphs: torch.cuda.graph_pool_handle()"
            }
            GrowthPart::Cached if matches!(self.apart(), Some(Apart::Pools(..))) => {
                "fewer captured shapes (pad to a few sizes); one torch.cuda.MemPool for all of this work, or none"
            }
            GrowthPart::Cached if matches!(self.apart(), Some(Apart::Streams(..))) => {
                "fewer streams: use the same few again, or one, for work that allocates"
            }
            GrowthPart::Cached if self.is_joined() => {
                "move results to the CPU before they are joined (transformers: eval_accumulation_steps), or \
                 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            }
            GrowthPart::Cached if self.is_expandable => {
                "pad inputs to a few sizes; torch.cuda.empty_cache() after the largest inputs gives unused segments back"
            }
            GrowthPart::Cached => {
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; memtrace tune replays it"
            }
            GrowthPart::Outside => match self.changes.in_part(GrowthPart::Outside).first() {
                Some(most) if most.what().starts_with("NCCL") => {
                    "torch.distributed.destroy_process_group(group) when a group is done, or one group for all of the run"
                }
                _ => "memtrace ledger has the parts; memtrace peak --of used has the calls",
            },
        }
    }
}
