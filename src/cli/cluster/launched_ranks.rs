//! The ranks that the command line of a launcher asks for: torchrun, accelerate or deepspeed.

use std::ffi::OsString;

use anyhow::{Result, bail};
use memtrace_trace::counts::counted;

use crate::cluster::launcher::LauncherKind;

/// The number of ranks per node, as given to the launcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PerNode {
    Number(u32),
    /// One rank for each card.
    EachCard,
}

/// The ranks that a launcher would start, and what it would give to each.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LaunchedRanks {
    pub(super) launcher: LauncherKind,
    /// The variables that the launcher sets for all ranks, in addition to the variables of each rank.
    pub(super) variables: Vec<(String, String)>,
    pub(super) nodes: u32,
    pub(super) per_node: PerNode,
    pub(super) role: String,
    pub(super) rdzv_id: String,
    pub(super) max_restarts: String,
    pub(super) is_module: bool,
    pub(super) without_python: bool,
    pub(super) virtual_local_rank: bool,
    /// The script or module, and its arguments.
    pub(super) script: Vec<OsString>,
}

impl LaunchedRanks {
    /// Returns the command line of a rank.
    pub(super) fn command(&self, python: &[OsString]) -> Vec<OsString> {
        let mut command = Vec::new();
        if !self.without_python {
            command.extend_from_slice(python);
            command.push("-u".into());
            if self.is_module {
                command.push("-m".into());
            }
        }
        command.extend_from_slice(&self.script);
        command
    }

    /// Returns the number of nodes and the number of ranks per node. `cards` is the number of cards in `--phantom`, if
    /// it is given.
    ///
    /// # Errors
    /// When the launcher asks for another number of ranks than there are cards.
    pub(super) fn nodes_and_ranks_per_node(&self, cards: Option<u32>) -> Result<(u32, u32)> {
        let (nodes, (name, options)) = (self.nodes, self.launcher.words());
        match (self.per_node, cards) {
            (PerNode::Number(per_node), None) => Ok((nodes, per_node)),
            (PerNode::Number(per_node), Some(cards)) => {
                let world = u64::from(nodes) * u64::from(per_node);
                if u64::from(cards) == world {
                    return Ok((nodes, per_node));
                }
                bail!(
                    "--phantom asks for {} and {name} for {world} ranks ({nodes} x {per_node}): make \
                     it {world}x, or change {options}",
                    counted(cards.into(), "card")
                )
            }
            (PerNode::EachCard, Some(cards)) if cards % nodes == 0 => Ok((nodes, cards / nodes)),
            (PerNode::EachCard, Some(cards)) => {
                bail!(
                    "--phantom asks for {}, which cannot be divided evenly among {nodes} nodes",
                    counted(cards.into(), "card")
                )
            }
            (PerNode::EachCard, None) => Ok((nodes, 1)),
        }
    }
}
