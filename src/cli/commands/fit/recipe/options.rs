//! The options of `memtrace fit` for recipes.

use std::path::PathBuf;

use clap::{Arg, ArgAction, value_parser};

use super::catalog::RECIPES;

/// The heading of the options in the help.
const HEADING: &str = "Recipes (a script for a model that you name; no weights are read)";

/// Returns the options of `fit` for recipes.
pub(crate) fn arguments() -> impl Iterator<Item = Arg> {
    let option = |name: &'static str, value: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(value).requires("recipe").help(help)
    };
    let names = RECIPES.map(|recipe| recipe.name);
    [
        option("recipe", "NAME", "Run this script instead of your own program, and find the largest batch")
            .value_parser(clap::builder::PossibleValuesParser::new(names))
            .requires("model"),
        option(
            "model",
            "MODEL",
            "A config.json, its folder, or a name such as Qwen/Qwen3-8B; for vision, timm's name",
        ),
        option(
            "seq",
            "LIST",
            "Sequence lengths in tokens, or widths of images in pixels, one row each, such as 2048,8192 \
             [default: 2048; diffusion 1024; vision 224]",
        )
        .visible_alias("size"),
        option(
            "set",
            "KEY=VALUE",
            "Change a setting of the recipe, such as rank=64 (repeatable); KEY={} searches for its value \
             instead of the batch",
        )
        .action(ArgAction::Append),
        option(
            "batch",
            "N",
            "The batch of a search for the value of another setting [default: 1; serve 256]",
        )
        .value_parser(value_parser!(u64).range(1..=1 << 20)),
        option("write", "FILE", "Write the script that was run, with the batch that fits, for a real GPU")
            .value_parser(value_parser!(PathBuf)),
        Arg::new("trust-remote-code")
            .long("trust-remote-code")
            .requires("recipe")
            .action(ArgAction::SetTrue)
            .help("Run the code that comes with the model's configuration"),
    ]
    .into_iter()
    .map(|arg| arg.help_heading(HEADING))
}
