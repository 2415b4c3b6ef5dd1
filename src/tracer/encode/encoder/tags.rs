//! Category changes after the allocation: by a tag, or because a block outlives the optimizer step that
//! allocated it.

use memtrace_trace::form::Form;
use memtrace_trace::memory::LiveMemory;
use memtrace_trace::rounding::MIN_BLOCK;
use memtrace_trace::text::{NONE, SCRIPT, UNKNOWN, WITHOUT_DETAIL};
use memtrace_trace::{Category, Claim, EventName, Header, Row};

use crate::emitter::{LIBRARY, RowSink};
use crate::encoder::Encoder;
use crate::live::{Live, Owner};
use crate::memory::Key;
use crate::text::PhaseKind;

/// Blocks and CPU tensors that optimizer steps have allocated since the last forward or backward.
pub(crate) struct Newborn {
    /// The key and the `alloc_id` of each block.
    blocks: Vec<(Key, i64)>,
    /// The length at which freed blocks are removed: twice the length after the previous removal.
    check_at: usize,
}

impl Newborn {
    /// The minimum length at which freed blocks are removed.
    const LEAST_CHECKED: usize = 1024;
}

impl Default for Newborn {
    fn default() -> Newborn {
        Newborn { blocks: Vec::new(), check_at: Newborn::LEAST_CHECKED }
    }
}

/// A use that the program assigns to a block.
#[derive(Clone, Copy)]
pub(crate) struct Use {
    pub(crate) category: Category,
    /// The module; 0 keeps the module of the allocation.
    pub(crate) module: u32,
    /// The name within the module.
    pub(crate) name: u32,
    /// The type and shape of the tensor; 0 if unknown.
    pub(crate) form: u32,
    /// The strength of the claim, which decides which earlier uses are replaced.
    pub(crate) claim: Claim,
}

impl Use {
    /// Returns true if a block keeps its current use instead of getting this one. `known` and `owner` are the
    /// block's current category and owner.
    fn yields_to(self, known: Category, owner: Owner<'_>) -> bool {
        use Category::{Activation, Buffer, Gradient, Input, KvCache, Parameter, Temporary, Workspace};
        use Category::{AllGather, ReduceScatter, UnshardedGradient, UnshardedParameter};
        match (self.category, self.claim) {
            // While FSDP has gathered the parameters of a module, they are the module's parameters.
            (Parameter, _) if matches!(known, UnshardedParameter | AllGather) => true,
            (Gradient, _) if known == UnshardedGradient => true,
            // A model input may be memory that already has a more specific category, such as a parameter. It
            // keeps that category.
            (Input, _) => !known.is_unclaimed(),
            (_, Claim::Strong) => false,
            // A cache or a workspace may have got one of these categories first, for example in a forward,
            // and replaces it.
            (KvCache | Workspace, Claim::Weak) => {
                !known.is_unclaimed() && !matches!(known, Input | Activation | Temporary | Buffer)
            }
            (Gradient, Claim::Weak) if known == ReduceScatter => false,
            (_, Claim::Weak) => !known.is_unclaimed(),
            // DDP allocates its buckets when it is created, and again in the second forward. A block that a
            // backward allocates is no bucket but part of the computation of a gradient. In a step without
            // detail, its category does not show this, so the phase decides.
            (_, Claim::Reduced) if owner.phase == "backward" => true,
            // A bucket that was tagged in a step without detail has no module. The first detailed step adds
            // the module.
            (_, Claim::Reduced) if known == Gradient => {
                ![NONE, SCRIPT, WITHOUT_DETAIL].contains(&owner.module)
            }
            (_, Claim::Reduced) => !known.is_unclaimed() && known != Activation,
        }
    }
}

/// A live block whose owner changes.
struct OwnerChange {
    key: Key,
    before: Live,
    after: Live,
}

impl Encoder {
    /// Returns the category of memory at its allocation, by its context; see "Categories" in the
    /// documentation. `pool` is the allocator's private pool.
    #[inline(always)]
    pub(crate) fn category_at_allocation(&self, context: u32, pool: u16) -> Category {
        use memtrace_trace::context::Context;
        let context = self.definitions.context(context);
        if context.category != Category::None {
            return context.category;
        }
        if pool > 0 && context.flags & Context::CAPTURED != 0 {
            return Category::CudaGraph;
        }
        match self.definitions.phase(context.phase) {
            PhaseKind::Optimizer if self.tags => Category::Temporary,
            PhaseKind::Optimizer => Category::OptimizerState,
            // Without detail, a gradient, a recomputed activation and temporary memory cannot be
            // distinguished.
            PhaseKind::Backward if context.flags & Context::WITHOUT_DETAIL != 0 => Category::None,
            PhaseKind::Backward if context.flags & Context::RECOMPUTED == 0 => Category::Temporary,
            PhaseKind::Forward | PhaseKind::Backward => Category::Activation,
            PhaseKind::Load if self.tags && context.flags & Context::INFERRED_PHASE != 0 => Category::Loaded,
            _ if self.tags && self.definitions.text(context.module) == SCRIPT => Category::Script,
            _ => Category::None,
        }
    }

    /// Returns the kind of the phase of a context.
    fn phase_of(&self, context: u32) -> PhaseKind {
        self.definitions.phase(self.definitions.context(context).phase)
    }

    /// Moves the bytes of a block from one owner to another, in two rows. The totals stay the same.
    pub(crate) fn tag<S: RowSink>(
        &mut self,
        tid: u32,
        header: &Header,
        address: u64,
        given: Use,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let Some((key, before)) = self.memory.live.block_at(address) else { return Ok(()) };
        let mut context = self.definitions.context(before.context);
        if given.module > 0 {
            context.module = given.module;
        }
        let form = self.form_of_tag(given.form, &before);
        let same = before.category == given.category
            && self.definitions.text(context.module) == self.definitions.owner(before.context).module
            && self.definitions.text(form) == self.definitions.text(before.form);
        if same || given.yields_to(before.category, self.definitions.owner(before.context)) {
            return Ok(());
        }
        if given.category == Category::Input && context.phase == 0 {
            // The script created or moved the block outside every phase.
            context.phase = self.definitions.own_text("dataloader");
        }
        let context = self.definitions.own_context(context);
        let after = Live { category: given.category, context, form, ..before };
        self.change_owner(tid, header, OwnerChange { key, before, after }, given.name, sink)
    }

    /// Returns the form of a block that gets a tag with `form`, whose tensor may have fewer or more bytes than the
    /// block: it is a part of a storage, or expanded. Then the block keeps the shape of its own tensor if that has the
    /// same type; otherwise the block has no shape. If the form of the tag is unknown, the block keeps its form.
    fn form_of_tag(&mut self, form: u32, block: &Live) -> u32 {
        let (known, own) = (self.definitions.form(form), self.definitions.form(block.form));
        if known == Form::UNKNOWN {
            return block.form;
        }
        let requested = block.requested;
        // Where the requested size is unknown, the rounded size takes its place.
        let is_whole = |bytes| (0..MIN_BLOCK.cast_signed()).contains(&(requested - bytes));
        let fills_block = known.bytes().is_none_or(|bytes| requested < 0 || is_whole(bytes));
        if fills_block && known.shape != UNKNOWN {
            return form;
        }
        if known.dtype == own.dtype {
            return block.form;
        }
        let text = format!("{} {UNKNOWN}", known.dtype);
        self.definitions.own_text(&text)
    }

    /// Writes the two rows of a block whose owner changes. `name` is the text id of the name in both rows.
    fn change_owner<S: RowSink>(
        &mut self,
        tid: u32,
        header: &Header,
        change: OwnerChange,
        name: u32,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let OwnerChange { key, before, after } = change;
        let address = key.address();
        for (live, bytes) in [(before, -before.bytes), (after, before.bytes)] {
            self.emit(
                &Row {
                    event: EventName::Tag,
                    delta_bytes: bytes,
                    source: LIBRARY,
                    name: self.definitions.text(name),
                    ..self.live_row(tid, header, address, &live)
                },
                sink,
            )?;
        }
        self.memory.live.insert(key, after);
        Ok(())
    }

    /// Adds a live block or CPU tensor to [`Newborn`], if an optimizer step allocated it.
    #[inline]
    pub(crate) fn add_newborn(&mut self, key: Key, live: &Live) {
        let is_optimizers = || self.phase_of(live.context) == PhaseKind::Optimizer;
        if live.category == Category::Temporary && is_optimizers() {
            let Newborn { blocks, check_at } = &mut self.newborn;
            blocks.push((key, live.alloc_id));
            if blocks.len() >= *check_at {
                let live = &self.memory.live;
                blocks.retain(|(key, id)| live.get(*key).is_some_and(|it| it.alloc_id == *id));
                *check_at = (2 * blocks.len()).max(Newborn::LEAST_CHECKED);
            }
        }
    }

    /// Called before each allocation. If the allocation is in a forward or a backward, the remaining blocks
    /// of previous optimizer steps that have no other use become optimizer state.
    #[inline(always)]
    pub(crate) fn keep_survivors<S: RowSink>(
        &mut self,
        tid: u32,
        header: &Header,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        if self.newborn.blocks.is_empty() {
            return Ok(());
        }
        self.keep_newborn(tid, header, sink)
    }

    /// The part of [`Encoder::keep_survivors`] that few allocations need.
    fn keep_newborn<S: RowSink>(&mut self, tid: u32, header: &Header, sink: &mut S) -> Result<(), S::Error> {
        if !matches!(self.phase_of(header.context), PhaseKind::Forward | PhaseKind::Backward) {
            return Ok(());
        }
        for (key, alloc_id) in std::mem::take(&mut self.newborn).blocks {
            let Some(before) = self.memory.live.get(key).copied() else { continue };
            if before.alloc_id == alloc_id && before.category == Category::Temporary {
                let after = Live { category: Category::OptimizerState, ..before };
                self.change_owner(tid, header, OwnerChange { key, before, after }, 0, sink)?;
            }
        }
        Ok(())
    }
}
