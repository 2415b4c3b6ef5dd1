//! The recipes of `memtrace fit --recipe`, and the templates of their scripts.
//!
//! Several recipes share a template. The lines after `# [NAME...]`, up to `# []`, are only in the scripts of the
//! recipes with these names. A name may also be a setting: its lines are in scripts in which the setting is changed,
//! and the lines of `!NAME` in scripts in which it is not. The line `# [+random_weights]` is replaced by the lines
//! that several templates share.

use serde_json::Value;

const TRAIN: &str = include_str!("scripts/train.py");
const ALIGN: &str = include_str!("scripts/align.py");
const PRETRAIN: &str = include_str!("scripts/pretrain.py");
const DIFFUSION: &str = include_str!("scripts/diffusion.py");
const VISION: &str = include_str!("scripts/vision.py");
const INFER: &str = include_str!("scripts/infer.py");
const SERVE: &str = include_str!("scripts/serve.py");

/// The lines that give a model random weights.
const RANDOM_WEIGHTS: &str = include_str!("scripts/random_weights.py");
/// The line of a template that these lines replace.
const RANDOM_WEIGHTS_MARKER: &str = "    # [+random_weights]\n";

/// A recipe.
pub(crate) struct Recipe {
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    /// The file in `scripts/`; see the top of this file for its markers.
    template: &'static str,
    /// The package that builds the model from its configuration.
    pub(crate) library: &'static str,
    /// The further packages that the script imports.
    pub(crate) packages: &'static [&'static str],
    /// The number of steps in a trial of the search, or an empty text if the script has no such option. With
    /// two steps, the peak includes the optimizer's state.
    pub(crate) steps: &'static str,
    /// The default of `--seq`, or of `--size` for models of images.
    pub(crate) length: &'static str,
}

impl Recipe {
    /// Returns the recipe with this name.
    pub(crate) fn named(name: &str) -> Option<&'static Recipe> {
        RECIPES.iter().find(|recipe| recipe.name == name)
    }

    /// Returns the name of the script's option for the length.
    pub(crate) fn length_option(&self) -> &'static str {
        if self.is_of_images() { "--size" } else { "--seq" }
    }

    pub(crate) fn is_of_images(&self) -> bool {
        matches!(self.library, "diffusers" | "timm")
    }

    /// Returns true if the script is one rank of a job with a process for each GPU.
    pub(crate) fn has_ranks(&self) -> bool {
        matches!(self.name, "pretrain" | "zero")
    }

    /// Returns true if the script starts a server, which fills the card at any batch.
    pub(crate) fn is_server(&self) -> bool {
        self.name == "serve"
    }

    /// Returns true if the script trains a model.
    pub(crate) fn trains(&self) -> bool {
        !matches!(self.name, "infer" | "serve")
    }

    /// Returns true if the script trains the weights themselves in the type of the setting `dtype`.
    pub(crate) fn trains_weights(&self) -> bool {
        matches!(self.name, "full" | "vision")
    }

    /// Returns the lines of the template that are in the script of this recipe, in which the settings with `is_changed`
    /// are changed. A setting has the name of its constant in small letters.
    pub(crate) fn script(&self, is_changed: impl Fn(&str) -> bool) -> String {
        let has = |name: &str| match name.strip_prefix('!') {
            Some(setting) => !is_changed(setting),
            None => name == self.name || is_changed(name),
        };
        let mut is_kept = true;
        let mut text = String::new();
        let template = self.template.replace(RANDOM_WEIGHTS_MARKER, random_weights());
        for line in template.lines() {
            // In the template, an empty line precedes the marker, because Python's formatter requires one after
            // imports. The script has no marker, so remove this line, too.
            let marker = line.trim_start();
            if marker == "# []" && is_kept && text.ends_with("\n\n") {
                text.pop();
            }
            if let Some(names) = marker.strip_prefix("# [").and_then(|rest| rest.strip_suffix(']')) {
                is_kept = names.is_empty() || names.split(' ').any(has);
            } else if is_kept {
                text.push_str(line);
                text.push('\n');
            }
        }
        text
    }

    /// Returns the script with all of its settings, for a list of them.
    pub(crate) fn with_all_settings(&self) -> String {
        self.script(|name| RECIPES.iter().all(|recipe| recipe.name != name))
    }

    /// Returns true if this recipe can have a model with this configuration.
    pub(crate) fn suits(&self, config: &Value) -> bool {
        config.get("_class_name").is_some() == (self.library == "diffusers")
    }
}

/// Returns the lines of [`RANDOM_WEIGHTS`] between its markers.
fn random_weights() -> &'static str {
    let rest = RANDOM_WEIGHTS.split_once("    # [random_weights]\n").map_or("", |(_, rest)| rest);
    rest.split_once("    # []\n").map_or("", |(lines, _)| lines)
}

/// What the recipes for models of transformers share.
const LANGUAGE: Recipe = Recipe {
    name: "",
    title: "",
    template: "",
    library: "transformers",
    packages: &["accelerate"],
    steps: "2",
    length: "2048",
};

pub(crate) const RECIPES: [Recipe; 11] = [
    Recipe { name: "full", title: "Full fine-tuning", template: TRAIN, ..LANGUAGE },
    Recipe {
        name: "lora",
        title: "LoRA fine-tuning",
        template: TRAIN,
        packages: &["accelerate", "peft"],
        ..LANGUAGE
    },
    Recipe {
        name: "qlora",
        title: "QLoRA fine-tuning (NF4)",
        template: TRAIN,
        packages: &["accelerate", "peft", "bitsandbytes"],
        ..LANGUAGE
    },
    Recipe {
        name: "dpo",
        title: "DPO with LoRA",
        template: ALIGN,
        packages: &["accelerate", "peft", "trl"],
        ..LANGUAGE
    },
    Recipe {
        name: "grpo",
        title: "GRPO with LoRA",
        template: ALIGN,
        packages: &["accelerate", "peft", "trl"],
        ..LANGUAGE
    },
    Recipe { name: "pretrain", title: "Pretraining with FSDP2", template: PRETRAIN, ..LANGUAGE },
    Recipe {
        name: "zero",
        title: "Pretraining with DeepSpeed's ZeRO",
        template: PRETRAIN,
        packages: &["deepspeed"],
        ..LANGUAGE
    },
    Recipe {
        name: "diffusion",
        title: "LoRA fine-tuning",
        template: DIFFUSION,
        library: "diffusers",
        packages: &["peft"],
        length: "1024",
        ..LANGUAGE
    },
    Recipe {
        name: "vision",
        title: "Training",
        template: VISION,
        library: "timm",
        packages: &[],
        length: "224",
        ..LANGUAGE
    },
    Recipe { name: "infer", title: "Generation", template: INFER, steps: "8", ..LANGUAGE },
    Recipe {
        name: "serve",
        title: "Serving with vLLM",
        template: SERVE,
        library: "vllm",
        packages: &["transformers"],
        steps: "",
        ..LANGUAGE
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_of_a_recipe_has_its_own_lines_alone_and_is_short() {
        for recipe in &RECIPES {
            let script = recipe.script(|_| false);
            assert!(!script.contains("# ["), "{}", recipe.name);
            let has_random_weights = [TRAIN, ALIGN, INFER].contains(&recipe.template);
            assert_eq!(
                script.matches(random_weights()).count(),
                usize::from(has_random_weights),
                "{}",
                recipe.name
            );
            // Some settings have lines of their own in the script, if they are set: packing and liger of the recipes
            // `full`, `lora` and `qlora`, and blocks_to_swap of `diffusion`.
            let most_with_all = match recipe.name {
                "lora" | "qlora" => 90,
                "diffusion" => 110,
                _ => 80,
            };
            for (script, most) in [(&script, 80), (&recipe.with_all_settings(), most_with_all)] {
                let lines = script.lines().count();
                assert!(lines < most, "{}: {lines} lines", recipe.name);
            }
            for package in ["peft", "bitsandbytes", "trl", "deepspeed"] {
                let is_listed = recipe.packages.contains(&package);
                assert_eq!(script.contains(package), is_listed, "{} {package}", recipe.name);
            }
            assert!(script.contains(&format!("import {}\n", recipe.library)), "{}", recipe.name);
            // Without data, a script that saves would train the real weights on noise.
            let is_checked = script.contains(".data) == args.random:\n    parser.error(");
            assert_eq!(script.contains("\"trained"), is_checked, "{}", recipe.name);
        }
    }

    #[test]
    fn lines_of_a_setting_are_in_scripts_that_change_it() {
        let lora = Recipe::named("lora").unwrap();
        for is_changed in [true, false] {
            let script = lora.script(|name| is_changed && name == "packing");
            assert_eq!(script.contains("\nPACKING = 1\n"), is_changed, "{script}");
            assert_eq!(script.contains("position_ids=places"), is_changed, "{script}");
            assert_ne!(script.contains("labels=part, use_cache=False"), is_changed, "{script}");
            assert!(!script.contains("LIGER"), "{script}");
        }
        let all = lora.with_all_settings();
        assert!(all.contains("\nPACKING = 1\n") && all.contains("\nLIGER = False\n"), "{all}");
        assert!(!all.contains("UPCAST"), "of qlora: {all}");
    }
}
