//! The mark with a fact about a called model that the sizes of its blocks do not show. Parses its name.

/// A fact about a model. Without a mark, most of its parameters are float32, all of them are trained, its batch
/// has several samples, and it is in training mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelFact<'a> {
    /// The type of most of the parameters, by their bytes, such as `bfloat16`.
    Type(&'a str),
    /// The bytes of the trained parameters; `None` if all are trained.
    Trained(Option<i64>),
    /// The type and the shape of the largest input of the latest call, such as `int64[8x1024]`.
    Input(&'a str),
    /// True if all inputs of the latest call have one sample.
    BatchOfOne(bool),
    /// True if the latest call was in evaluation mode.
    Evaluates(bool),
    /// The class of the optimizer of its parameters, found after an OOM, followed by `fused` and the options that add
    /// state, such as `SGD,momentum`.
    Optimizer(&'a str),
    /// The bytes of its parameters that were on the CPU when memory ran out, while others were on a GPU.
    OnCpu(i64),
    /// The bytes of its parameters that require a gradient but that no optimizer has, found after an OOM. The path
    /// names the innermost module with all these parameters.
    NoOptimizer(i64),
}

impl<'a> ModelFact<'a> {
    /// Parses the name of a mark, such as `type=bfloat16 GPT`. Returns the fact and the path of the root.
    #[must_use]
    pub fn parse(name: &'a str) -> Option<(ModelFact<'a>, &'a str)> {
        let (fact, path) = name.split_once(' ')?;
        let fact = match fact.split_once('=')? {
            ("type", name) => ModelFact::Type(name),
            ("trained", bytes) => ModelFact::Trained(bytes.parse().ok()),
            ("input", form) => ModelFact::Input(form),
            ("batch", samples) => ModelFact::BatchOfOne(samples == "one"),
            ("mode", mode) => ModelFact::Evaluates(mode == "eval"),
            ("optimizer", class) => ModelFact::Optimizer(class),
            ("on_cpu", bytes) => ModelFact::OnCpu(bytes.parse().ok()?),
            ("no_optimizer", bytes) => ModelFact::NoOptimizer(bytes.parse().ok()?),
            _ => return None,
        };
        Some((fact, path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_model_fact_is_parsed() {
        assert_eq!(ModelFact::parse("type=bfloat16 GPT"), Some((ModelFact::Type("bfloat16"), "GPT")));
        assert_eq!(ModelFact::parse("trained=512 GPT"), Some((ModelFact::Trained(Some(512)), "GPT")));
        assert_eq!(ModelFact::parse("trained=all GPT"), Some((ModelFact::Trained(None), "GPT")));
        let input = ModelFact::Input("int64[8x1024]");
        assert_eq!(ModelFact::parse("input=int64[8x1024] GPT"), Some((input, "GPT")));
        assert_eq!(ModelFact::parse("batch=one my net"), Some((ModelFact::BatchOfOne(true), "my net")));
        assert_eq!(ModelFact::parse("batch=several GPT"), Some((ModelFact::BatchOfOne(false), "GPT")));
        assert_eq!(ModelFact::parse("mode=eval GPT"), Some((ModelFact::Evaluates(true), "GPT")));
        assert_eq!(ModelFact::parse("optimizer=SGD GPT"), Some((ModelFact::Optimizer("SGD"), "GPT")));
        assert_eq!(ModelFact::parse("on_cpu=512 GPT"), Some((ModelFact::OnCpu(512), "GPT")));
        assert_eq!(ModelFact::parse("no_optimizer=512 GPT.h"), Some((ModelFact::NoOptimizer(512), "GPT.h")));
        for other in ["", "on_cpu=all GPT", "type=bfloat16", "GPT", "size=1 GPT"] {
            assert_eq!(ModelFact::parse(other), None, "{other}");
        }
    }
}
