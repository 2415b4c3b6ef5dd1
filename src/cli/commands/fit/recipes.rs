//! The recipes of `memtrace fit --recipe`.

use serde_json::Value;

const TRAIN: &str = include_str!("recipes/train.py");
const ALIGN: &str = include_str!("recipes/align.py");
const PRETRAIN: &str = include_str!("recipes/pretrain.py");
const DIFFUSION: &str = include_str!("recipes/diffusion.py");
const VISION: &str = include_str!("recipes/vision.py");
const INFER: &str = include_str!("recipes/infer.py");
const SERVE: &str = include_str!("recipes/serve.py");

/// A recipe.
pub(super) struct Recipe {
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    pub(super) script: &'static str,
    /// The package that builds the model from its configuration.
    pub(super) library: &'static str,
    /// The further packages that the script imports.
    pub(super) packages: &'static [&'static str],
    /// The number of steps in a trial of the search, or an empty text if the script has no such option. With
    /// two steps, the peak includes the optimizer's state.
    pub(super) steps: &'static str,
    /// The default of `--seq`, or of `--size` for models of images.
    pub(super) length: &'static str,
}

impl Recipe {
    /// Returns the name of the script's option for the length.
    pub(super) fn length_option(&self) -> &'static str {
        if self.is_of_images() { "--size" } else { "--seq" }
    }

    pub(super) fn is_of_images(&self) -> bool {
        matches!(self.library, "diffusers" | "timm")
    }

    /// Returns true if the script is one rank of a job with a process for each GPU.
    pub(super) fn has_ranks(&self) -> bool {
        matches!(self.name, "pretrain" | "zero")
    }

    /// Returns true if this recipe can have a model with this configuration.
    pub(super) fn suits(&self, config: &Value) -> bool {
        config.get("_class_name").is_some() == (self.library == "diffusers")
    }
}

pub(super) const RECIPES: [Recipe; 11] = [
    Recipe {
        name: "full",
        title: "Full fine-tuning",
        script: TRAIN,
        library: "transformers",
        packages: &["accelerate"],
        steps: "2",
        length: "2048",
    },
    Recipe {
        name: "lora",
        title: "LoRA fine-tuning",
        script: TRAIN,
        library: "transformers",
        packages: &["accelerate", "peft"],
        steps: "2",
        length: "2048",
    },
    Recipe {
        name: "qlora",
        title: "QLoRA fine-tuning (NF4)",
        script: TRAIN,
        library: "transformers",
        packages: &["accelerate", "peft", "bitsandbytes"],
        steps: "2",
        length: "2048",
    },
    Recipe {
        name: "dpo",
        title: "DPO with LoRA",
        script: ALIGN,
        library: "transformers",
        packages: &["accelerate", "peft", "trl"],
        steps: "2",
        length: "2048",
    },
    Recipe {
        name: "grpo",
        title: "GRPO with LoRA",
        script: ALIGN,
        library: "transformers",
        packages: &["accelerate", "peft", "trl"],
        steps: "2",
        length: "2048",
    },
    Recipe {
        name: "pretrain",
        title: "Pretraining with FSDP2",
        script: PRETRAIN,
        library: "transformers",
        packages: &[],
        steps: "2",
        length: "2048",
    },
    Recipe {
        name: "zero",
        title: "Pretraining with DeepSpeed's ZeRO",
        script: PRETRAIN,
        library: "transformers",
        packages: &["deepspeed"],
        steps: "2",
        length: "2048",
    },
    Recipe {
        name: "diffusion",
        title: "LoRA fine-tuning",
        script: DIFFUSION,
        library: "diffusers",
        packages: &["peft"],
        steps: "2",
        length: "1024",
    },
    Recipe {
        name: "vision",
        title: "Training",
        script: VISION,
        library: "timm",
        packages: &[],
        steps: "2",
        length: "224",
    },
    Recipe {
        name: "infer",
        title: "Generation",
        script: INFER,
        library: "transformers",
        packages: &["accelerate"],
        steps: "8",
        length: "2048",
    },
    Recipe {
        name: "serve",
        title: "Serving with vLLM",
        script: SERVE,
        library: "vllm",
        packages: &["transformers"],
        steps: "",
        length: "2048",
    },
];
