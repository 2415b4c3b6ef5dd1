//! The column `category`.

use serde::{Deserialize, Serialize};

use crate::text_enum::text_enum;

text_enum! {
    /// The column `category`: what memory is for.
    #[derive(Default)]
    Category {
        /// A parameter of a module.
        Parameter = "parameter",
        /// A buffer of a module.
        Buffer = "buffer",
        /// A parameter's gradient.
        Gradient = "gradient",
        /// Made in a forward pass.
        Activation = "activation",
        /// Made in a backward pass.
        Temporary = "temporary",
        /// Held by an optimizer.
        OptimizerState = "optimizer_state",
        /// Given to the model.
        Input = "input",
        /// Made by autograd for itself.
        AutogradDetail = "autograd_detail",
        /// Registered by the user.
        Other = "other",
        /// Not known.
        #[default]
        None = "(none)",
    }
}
