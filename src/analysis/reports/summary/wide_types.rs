//! The float32 memory of a program that computes in 16 bits or fewer, and what a quantized model has not
//! quantized.

use memtrace_trace::form::Form;
use memtrace_trace::text::UNKNOWN;
use memtrace_trace::units::Unit;
use rustc_hash::FxHashSet;

use crate::read::symbols::Symbol;
use crate::render::numbers::{percent, share};
use crate::state::group::{Group, Key, category, layers_of, sorted};
use crate::state::replay::{Block, Replay};

/// The minimum share of the peak that float32 must have for a line, and the minimum share of the parameters,
/// or of what is computed, that narrower types must have.
const NOTABLE: f64 = 0.1;
/// The maximum number of modules in the line.
const MODULES: usize = 3;
/// The maximum number of shapes in the line.
const SHAPES: usize = 2;
/// The size of a value in nf4 as a share of its size in 16 bits. It includes the scales: 4 bytes for 64
/// values.
const NF4_SHARE: f64 = 0.5625 / 2.0;
/// The types of 16 bits.
const HALF: [&str; 2] = ["bfloat16", "float16"];
/// The beginnings of the names of types with 16 bits or fewer. Packed types have a `(` in their names.
const NARROW: [&str; 6] = ["bfloat16", "float16", "float8", "float4", "int8", "uint8"];

/// Returns a sentence about the float32 tensors among the blocks of a peak, if they have at least a tenth of
/// the peak, and other parameters are packed or have 16 bits or fewer. If few parameters have, as under
/// autocast, only what the program computes counts. The types of small tensors are not recorded, so the share
/// is a lower bound.
pub(super) fn wide_types(blocks: &[Block], replay: &Replay, units: Unit) -> Option<String> {
    let symbols = &replay.symbols;
    let float32 = symbols.intern("float32");
    let is_packed = |block: &&Block| is_packed(&symbols.get(block.dtype));
    let is_narrow = |block: &&Block| {
        let name = symbols.get(block.dtype);
        is_packed(block) || NARROW.iter().any(|narrow| name.starts_with(narrow))
    };
    let parameters = parameters(blocks);
    // Packed parameters have few bytes, so any number of them is enough.
    let packed: Vec<Block> = parameters.iter().filter(is_packed).copied().collect();
    let narrow: Vec<Block> = match packed.is_empty() {
        true => parameters.iter().filter(is_narrow).copied().collect(),
        false => packed,
    };
    let wide: Vec<Block> = blocks.iter().filter(|block| block.dtype == float32).copied().collect();
    let bytes = sum(&wide);
    if !narrow.iter().any(|block| is_packed(&block)) && share(sum(&narrow), sum(&parameters)) < NOTABLE {
        return wide_results(blocks, &wide, replay, units, &is_narrow);
    }
    if share(bytes, sum(blocks)) < NOTABLE {
        return None;
    }
    let groups = |key: &Key, blocks: &[Block]| sorted(key.groups(blocks, symbols));
    let (narrow_type, Group { bytes: narrow_bytes, .. }) = groups(&Key::DTYPE, &narrow).into_iter().next()?;
    let parts: Vec<String> = groups(&Key::CATEGORY, &wide)
        .into_iter()
        .map(|(name, group)| format!("{name} {}", units.show(group.bytes)))
        .collect();
    let by_module = groups(&Key::MODULE.joining(&layers_of(replay, blocks)), &wide);
    // PEFT's `prepare_model_for_kbit_training` converts each parameter that is not packed to float32.
    let is_peft = narrow_type.contains('(') && by_module.iter().any(|(name, _)| name.contains(".lora_"));
    let made_by = match is_peft {
        true => " (PEFT's prepare_model_for_kbit_training makes parameters float32 that are not quantized)",
        false => "",
    };
    let modules = largest(&by_module);
    Some(format!(
        "float32 has {} ({}) of this peak, beside {} of parameters in {narrow_type}: {}; most in {modules}{made_by}. In 16 bits \
         it would have {} less",
        units.show(bytes),
        percent(share(bytes, sum(blocks))),
        units.show(narrow_bytes),
        parts.join(", "),
        units.show(bytes / 2),
    ))
}

/// Returns a sentence about the 16-bit parameters of a model whose other parameters are packed, if they have
/// at least a tenth of the peak. The scales of a packed weight are parameters of its module, so the modules
/// with packed parameters do not count.
pub(super) fn not_quantized(blocks: &[Block], replay: &Replay, units: Unit) -> Option<String> {
    let symbols = &replay.symbols;
    let parameters = parameters(blocks);
    let (packed, other): (Vec<Block>, Vec<Block>) =
        parameters.iter().partition(|block| is_packed(&symbols.get(block.dtype)));
    let quantized: FxHashSet<Symbol> = packed.iter().map(|block| block.owner.module).collect();
    let is_half = |block: &Block| HALF.contains(&&*symbols.get(block.dtype));
    let is_whole = |block: &Block| is_half(block) && !quantized.contains(&block.owner.module);
    let half: Vec<Block> = other.into_iter().filter(is_whole).collect();
    let bytes = sum(&half);
    if share(bytes, sum(blocks)) < NOTABLE {
        return None;
    }
    let groups = |key: &Key, blocks: &[Block]| sorted(key.groups(blocks, symbols));
    let (packed_type, Group { bytes: packed_bytes, .. }) = groups(&Key::DTYPE, &packed).into_iter().next()?;
    let modules = largest(&groups(&Key::MODULE.joining(&layers_of(replay, blocks)), &half));
    // The experts of transformers 5 are one parameter of three dimensions, and no `nn.Linear`. The weights of
    // one-dimensional convolutions have three dimensions, too.
    let is_fused = |block: &Block| {
        let dims = Form { dtype: UNKNOWN, shape: &symbols.get(block.shape) }.dims();
        dims.is_some_and(|dims| dims.len() == 3)
            && symbols.get(block.owner.module).to_lowercase().contains("expert")
    };
    let fused = sum(&half.into_iter().filter(is_fused).collect::<Vec<_>>());
    let mut experts = String::new();
    if share(fused, bytes) >= NOTABLE {
        experts = format!(
            ". Of these, {} are fused experts: quantizers pack nn.Linear layers only",
            units.show(fused)
        );
        if let Some(saved) = saved_by_packing(&packed_type) {
            let saved = units.show((fused as f64 * saved) as i64);
            experts.push_str(&format!(". Packed they would have about {saved} less"));
        }
    }
    Some(format!(
        "parameters in 16 bits have {} ({}) of this peak, beside {} in {packed_type}: most in {modules}{experts}",
        units.show(bytes),
        percent(share(bytes, sum(blocks))),
        units.show(packed_bytes),
    ))
}

/// Returns the share of the bytes of 16-bit values that packing in this type saves, if the type is known.
fn saved_by_packing(packed_type: &str) -> Option<f64> {
    match packed_type.split('(').next()? {
        "nf4" | "fp4" => Some(1.0 - NF4_SHARE),
        "int8" | "qint8" => Some(0.5),
        stored if stored.starts_with("float8") => Some(0.5),
        _ => None,
    }
}

/// Returns true for a type such as `nf4(bfloat16)`, whose values are stored in less than 16 bits.
fn is_packed(dtype: &str) -> bool {
    dtype.split_once('(').is_some_and(|(stored, _)| !HALF.contains(&stored))
}

/// Returns a sentence about the float32 tensors that a program computes, if few of its parameters are
/// narrower and other results have 16 bits.
fn wide_results(
    blocks: &[Block],
    wide: &[Block],
    replay: &Replay,
    units: Unit,
    is_narrow: &dyn Fn(&&Block) -> bool,
) -> Option<String> {
    let symbols = &replay.symbols;
    let is_result = |block: &&Block| matches!(category(block.owner.category), "activation" | "temporary");
    let wide: Vec<Block> = wide.iter().filter(is_result).copied().collect();
    let computes = |block: &&Block| symbols.get(block.dtype).contains("float") && is_narrow(block);
    let narrow: Vec<Block> = blocks.iter().filter(is_result).filter(computes).copied().collect();
    let bytes = sum(&wide);
    if share(bytes, sum(blocks)) < NOTABLE || share(sum(&narrow), bytes + sum(&narrow)) < NOTABLE {
        return None;
    }
    let groups = |key: &Key, blocks: &[Block]| sorted(key.groups(blocks, symbols));
    let (narrow_type, Group { bytes: narrow_bytes, .. }) = groups(&Key::DTYPE, &narrow).into_iter().next()?;
    let large =
        groups(&Key::SHAPE, &wide).into_iter().filter(|(_, group)| share(group.bytes, bytes) >= NOTABLE);
    let shapes: Vec<String> =
        large.take(SHAPES).map(|(shape, group)| format!("{} in {shape}", units.show(group.bytes))).collect();
    let most = if shapes.is_empty() { "of many shapes".to_owned() } else { shapes.join(", ") };
    Some(format!(
        "activations and temporaries in float32 have {} ({}) of this peak, beside {} in {narrow_type}: {most}. In 16 bits they \
         would have {} less",
        units.show(bytes),
        percent(share(bytes, sum(blocks))),
        units.show(narrow_bytes),
        units.show(bytes / 2),
    ))
}

/// Returns the blocks of parameters.
fn parameters(blocks: &[Block]) -> Vec<Block> {
    blocks.iter().filter(|block| category(block.owner.category) == "parameter").copied().collect()
}

/// Returns the names of the largest modules: of each that has a notable share of the bytes of all `modules`,
/// at most [`MODULES`]. The largest comes first.
fn largest(modules: &[(String, Group)]) -> String {
    let bytes = modules.iter().map(|(_, group)| group.bytes).sum();
    let large = modules.iter().filter(|(_, group)| share(group.bytes, bytes) >= NOTABLE);
    let names: Vec<&str> = large.take(MODULES).map(|(name, _)| name.as_str()).collect();
    if names.is_empty() { "many modules".to_owned() } else { names.join(", ") }
}

/// Returns the bytes of these blocks.
fn sum(blocks: &[Block]) -> i64 {
    blocks.iter().map(|block| block.bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::{is_packed, saved_by_packing};

    #[test]
    fn a_type_is_packed_if_its_values_have_less_than_16_bits() {
        for packed in ["nf4(bfloat16)", "int8(float32)", "float8_e4m3fn(bfloat16)"] {
            assert!(is_packed(packed), "{packed}");
        }
        for other in ["bfloat16(float32)", "float16(float32)", "bfloat16", "int8", "", "?"] {
            assert!(!is_packed(other), "{other}");
        }
    }

    #[test]
    fn what_packing_saves_is_known_for_known_types_only() {
        assert_eq!(saved_by_packing("nf4(bfloat16)"), Some(0.71875));
        assert_eq!(saved_by_packing("int8(bfloat16)"), Some(0.5));
        assert_eq!(saved_by_packing("float8_e5m2(bfloat16)"), Some(0.5));
        // torchao's packed int4 is stored as uint8.
        assert_eq!(saved_by_packing("uint8(bfloat16)"), None);
    }
}
