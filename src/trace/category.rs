//! The column `category`.

use serde::{Deserialize, Serialize};

use crate::text_enum::text_enum;

text_enum! {
    /// The purpose of memory.
    #[derive(Default)]
    Category {
        /// A parameter of a module.
        Parameter = "parameter",
        /// A buffer of a module.
        Buffer = "buffer",
        /// A parameter's gradient.
        Gradient = "gradient",
        /// Allocated in a forward pass.
        Activation = "activation",
        /// Allocated in a backward pass.
        Temporary = "temporary",
        /// Held by an optimizer.
        OptimizerState = "optimizer_state",
        /// An input of the model.
        Input = "input",
        /// Allocated by autograd for its own use.
        AutogradDetail = "autograd_detail",
        /// Registered by the user.
        Other = "other",
        /// Unknown.
        [default]
        None = "(none)",
    }
}
