//! Categories that change after the allocation: by a tag, or because a block outlives the optimizer's step that
//! made it.

use memtrace_trace::memory::LiveMemory;
use memtrace_trace::text::{LOAD, NONE, SCRIPT, WITHOUT_DETAIL};
use memtrace_trace::{Category, Claim, EventName, Header, Row};

use crate::encoder::{Encoder, LIBRARY, RowSink};
use crate::live::{Live, Owner};
use crate::memory::Key;

/// Blocks that optimizers' steps allocated since the last forward or backward.
pub(crate) struct Newborn {
    /// Address and `alloc_id`.
    blocks: Vec<(u64, i64)>,
    /// The length at which freed blocks are dropped: twice the length after the last time.
    check_at: usize,
}

impl Newborn {
    /// The least length at which freed blocks are dropped.
    const LEAST_CHECKED: usize = 1024;
}

impl Default for Newborn {
    fn default() -> Newborn {
        Newborn { blocks: Vec::new(), check_at: Newborn::LEAST_CHECKED }
    }
}

/// Returns true for a phase in which an optimizer makes its state.
fn is_optimizer(phase: &str) -> bool {
    matches!(phase, "optimizer" | "optimizer.step")
}

/// A use that the program has given to a block.
#[derive(Clone, Copy)]
pub(crate) struct Use {
    pub(crate) category: Category,
    /// The module; 0 means the module of the allocation.
    pub(crate) module: u32,
    /// The name in the module.
    pub(crate) name: u32,
    /// The uses that it replaces.
    pub(crate) claim: Claim,
}

impl Use {
    /// Returns true if a block of category `known` keeps it and its `owner`.
    fn yields_to(self, known: Category, owner: Owner<'_>) -> bool {
        use Category::{Activation, Buffer, Gradient, Input, KvCache, Temporary, Workspace};
        match (self.category, self.claim) {
            // An input of the model may be memory with a more specific category.
            (Input, _) => !known.is_unclaimed(),
            (_, Claim::Strong) => false,
            // A cache or a workspace may be allocated in a forward.
            (KvCache | Workspace, Claim::Weak) => {
                !known.is_unclaimed() && !matches!(known, Input | Activation | Temporary | Buffer)
            }
            (_, Claim::Weak) => !known.is_unclaimed(),
            // DDP allocates its buckets when it is made, and anew in the second forward. What a backward
            // allocates is a part of the gradient's computation there; without detail its category does not
            // show this.
            (_, Claim::Reduced) if owner.phase == "backward" => true,
            // A bucket that has no module yet gets it in the first step with detail.
            (_, Claim::Reduced) if known == Gradient => {
                ![NONE, SCRIPT, WITHOUT_DETAIL].contains(&owner.module)
            }
            (_, Claim::Reduced) => !known.is_unclaimed() && known != Activation,
        }
    }
}

impl Encoder {
    /// The category of memory at its allocation, by its context; see "Categories" in the documentation. `pool`
    /// is the allocator's private pool.
    pub(crate) fn category_at_allocation(&self, context: u32, pool: u16) -> Category {
        use memtrace_trace::context::Context;
        let context = self.context(context);
        if context.flags & Context::GATHERED != 0 {
            return Category::Parameter;
        }
        if pool > 0 && context.flags & Context::CAPTURED != 0 {
            return Category::CudaGraph;
        }
        match self.text(context.phase) {
            phase if is_optimizer(phase) && self.tags => Category::Temporary,
            phase if is_optimizer(phase) => Category::OptimizerState,
            // A gradient, an activation of a recomputation or temporary: nothing tells them apart there.
            "backward" if context.flags & Context::WITHOUT_DETAIL != 0 => Category::None,
            "backward" if context.flags & Context::RECOMPUTED == 0 => Category::Temporary,
            "forward" | "backward" => Category::Activation,
            LOAD if self.tags && context.flags & Context::INFERRED_PHASE != 0 => Category::Loaded,
            _ if self.tags && self.text(context.module) == SCRIPT => Category::Script,
            _ => Category::None,
        }
    }

    /// Moves the bytes of a block from one owner to another, in two rows. The totals do not change.
    pub(crate) fn tag<S: RowSink>(
        &mut self,
        tid: u32,
        header: &Header,
        address: u64,
        given: Use,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let Some((key, before)) = self.memory.live.block_at(address) else { return Ok(()) };
        let mut context = self.context(before.context);
        if given.module > 0 {
            context.module = given.module;
        }
        let same = before.category == given.category
            && self.text(context.module) == self.owner(before.context).module;
        if same || given.yields_to(before.category, self.owner(before.context)) {
            return Ok(());
        }
        if given.category == Category::Input && context.phase == 0 {
            // The script made or moved it outside every phase.
            context.phase = self.own_names.number("dataloader");
        }
        let context = self.own_names.id(context);
        let after = Live { category: given.category, context, ..before };
        self.change_owner(tid, header, (key, address), (before, after), given.name, sink)
    }

    /// Writes the two rows of a block whose owner changes from `before` to `after`.
    fn change_owner<S: RowSink>(
        &mut self,
        tid: u32,
        header: &Header,
        (key, address): (Key, u64),
        (before, after): (Live, Live),
        name: u32,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        for (live, bytes) in [(before, -before.bytes), (after, before.bytes)] {
            self.emit(
                &Row {
                    event: EventName::Tag,
                    delta_bytes: bytes,
                    source: LIBRARY,
                    name: self.text(name),
                    ..self.of_live(tid, header, address, &live)
                },
                sink,
            )?;
        }
        self.memory.live.insert(key, after);
        Ok(())
    }

    /// Adds a block that is live now, if an optimizer's step made it.
    #[inline]
    pub(crate) fn add_newborn(&mut self, address: u64, live: &Live) {
        if live.category == Category::Temporary && is_optimizer(self.owner(live.context).phase) {
            let Newborn { blocks, check_at } = &mut self.newborn;
            blocks.push((address, live.alloc_id));
            if blocks.len() >= *check_at {
                let live = &self.memory.live.blocks;
                blocks.retain(|(address, id)| live.get(address).is_some_and(|it| it.alloc_id == *id));
                *check_at = (2 * blocks.len()).max(Newborn::LEAST_CHECKED);
            }
        }
    }

    /// Before an allocation of a forward or a backward: what is left of the optimizer's step before it, and has
    /// no other use, is the optimizer's state.
    #[inline]
    pub(crate) fn keep_survivors<S: RowSink>(
        &mut self,
        tid: u32,
        header: &Header,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        if self.newborn.blocks.is_empty()
            || !matches!(self.owner(header.context).phase, "forward" | "backward")
        {
            return Ok(());
        }
        for (address, alloc_id) in std::mem::take(&mut self.newborn).blocks {
            let Some(before) = self.memory.live.blocks.get(&address).copied() else { continue };
            if before.alloc_id == alloc_id && before.category == Category::Temporary {
                let after = Live { category: Category::OptimizerState, ..before };
                self.change_owner(tid, header, (Key::Block(address), address), (before, after), 0, sink)?;
            }
        }
        Ok(())
    }
}
