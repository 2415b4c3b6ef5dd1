//! The workspace of a convolution that cuDNN leaves to cuBLASLt.
//!
//! On a Hopper card, cuDNN computes a convolution with a filter of one point, without stride or padding, as
//! one matrix product for each image. Without a device this engine is missing, because cuBLASLt has no
//! handle, and the next engine copies input and output into another layout. So the first plan of such a
//! convolution gets the workspace that an H200 took: none for the output and for the gradient of the input,
//! and the gradients of all images for the gradient of the filter. This holds for channels first, where
//! the copies are large. In the other layout the next engine takes little, too.

use std::str::FromStr;

/// In a ResNet-50 on the H200, the gradient of the filter was a product if this needed up to 1.01 times the
/// workspace of the next plan, and no product from 1.43 times on. The bound is between these: 6/5.
const MAX_RATIO_TO_NEXT_PLAN: (usize, usize) = (6, 5);

/// Returns the text after a mark.
fn after<'text>(text: &'text str, mark: &str) -> Option<&'text str> {
    text.split_once(mark).map(|(_, rest)| rest)
}

/// Reads the numbers of the list that follows a mark.
fn numbers(text: &str, mark: &str) -> Option<Vec<usize>> {
    let (list, _) = after(text, mark)?.split_once(']')?;
    list.split(',').map(usize::from_str).collect::<Result<_, _>>().ok()
}

/// Returns the workspace of the product that replaces the first plan of a graph, in bytes, or `None` if the
/// graph is not a convolution of this kind. `plan` is cuDNN's description of that plan, and `workspace` what
/// it takes.
pub(crate) fn workspace_of_product(plan: &str, workspace: usize) -> Option<usize> {
    let (tensors, nodes) = plan.split_once("\"nodes\":[")?;
    let (node, rest) = nodes.split_once('}')?;
    if !rest.starts_with(']') || !node.contains("OPERATION_CONVOLUTION_") {
        return None;
    }
    let tensor = |key: &str| {
        let name = after(node, &format!("{key}\":\""))?.split_once('"')?.0;
        let text = after(tensors, &format!("\"name\":\"{name}\""))?;
        Some((numbers(text, "\"dim\":[")?, numbers(text, "\"stride\":[")?))
    };
    let ((input, strides), (filter, _)) = (tensor("X")?, tensor("W")?);
    let [images, channels, places @ ..] = &*input else { return None };
    let [outputs, of_group, points @ ..] = &*filter else { return None };
    let places: usize = places.iter().product();
    let is_plain = points.iter().all(|&point| point == 1)
        && numbers(node, "\"stride\":[")?.iter().all(|&step| step == 1)
        && numbers(node, "\"pad\":[")?.iter().all(|&pad| pad == 0)
        && channels == of_group
        && strides.get(1) == Some(&places)
        && places.is_multiple_of(4);
    if !is_plain {
        return None;
    }
    if !node.contains("_BACKWARD_FILTER_") {
        return Some(0);
    }
    let gradients = images * outputs * channels * size_of::<f32>();
    let (numerator, denominator) = MAX_RATIO_TO_NEXT_PLAN;
    (gradients * denominator <= workspace * numerator).then_some(gradients)
}

#[cfg(test)]
mod tests {
    use super::workspace_of_product;

    fn plan(operation: &str, keys: [&str; 3], side: usize, outputs: usize, pad: usize) -> String {
        let tensor = |name, sizes: [usize; 4]| {
            let [_, a, b, c] = sizes;
            format!(
                "{{\"name\":\"{name}\",\"dim\":[{},{a},{b},{c}],\"stride\":[{},{},{c},1]}}",
                sizes[0],
                a * b * c,
                b * c
            )
        };
        let [w, x, y] = keys;
        format!(
            "{{\"tensors\":[{},{},{}],\
             \"nodes\":[{{\"operation\":\"CUDNN_BACKEND_OPERATION_CONVOLUTION_{operation}_DESCRIPTOR\",\
             \"pad\":[{pad},{pad}],\"stride\":[1,1],\
             \"{x}\":\"120\",\"{w}\":\"119\",\"{y}\":\"121\"}}]}}",
            tensor("119", [outputs, 64, 1, 1]),
            tensor("120", [32, 64, side, side]),
            tensor("121", [32, outputs, side, side]),
        )
    }

    const FORWARD: (&str, [&str; 3]) = ("FORWARD", ["W", "X", "Y"]);
    const DATA: (&str, [&str; 3]) = ("BACKWARD_DATA", ["W", "dX", "dY"]);
    const FILTER: (&str, [&str; 3]) = ("BACKWARD_FILTER", ["dW", "X", "dY"]);

    #[test]
    fn the_workspaces_of_an_h200() {
        for ((operation, keys), outputs, next, product) in [
            (FORWARD, 256, 25_755_664, Some(0)),
            (DATA, 256, 128_450_707, Some(0)),
            (FILTER, 64, 52_854_928, Some(524_288)),
            (FILTER, 256, 131_989_648, Some(2_097_152)),
        ] {
            assert_eq!(workspace_of_product(&plan(operation, keys, 56, outputs, 0), next), product);
        }
    }

    #[test]
    fn other_convolutions_keep_their_plan() {
        let (operation, keys) = FILTER;
        assert_eq!(workspace_of_product(&plan(operation, keys, 7, 64, 0), 1 << 20), None);
        assert_eq!(workspace_of_product(&plan(operation, keys, 56, 64, 1), 1 << 20), None);
        assert_eq!(workspace_of_product(&plan(operation, keys, 56, 64, 0), 1 << 18), None);
        assert_eq!(workspace_of_product("{}", 0), None);
    }
}
