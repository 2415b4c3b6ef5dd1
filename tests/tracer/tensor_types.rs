//! The types and shapes of tensors in traces, and the largest input of a run.

use crate::common::torch::{Run, Torch, memtrace, on_every_torch, text};

use std::collections::BTreeMap;

use serde_json::json;

const SCRIPT: &str = "tensor_types/several.py";

on_every_torch![
    types_and_shapes_are_those_of_torch: "the tracer reads tensors",
    types_and_shapes_of_allocations_are_those_of_torch: "the tracer reads the arguments of C++ functions",
    the_step_with_the_largest_input_is_named_with_and_without_detail,
    types_of_packed_parts_name_the_type_they_stand_for,
    graphs_of_traced_models_get_no_op_and_no_guard,
];

/// By module and name, and category: the types and shapes in the `tag` rows.
fn tagged(run: &Run) -> BTreeMap<(String, String), Vec<[String; 2]>> {
    let mut found: BTreeMap<(String, String), Vec<[String; 2]>> = BTreeMap::new();
    let mut reader = csv::Reader::from_path(run.file()).unwrap();
    let at: BTreeMap<String, usize> =
        reader.headers().unwrap().iter().enumerate().map(|(index, name)| (name.to_owned(), index)).collect();
    for row in reader.records() {
        let row = row.unwrap();
        let column = |name: &str| row[at[name]].to_owned();
        let form = [column("dtype"), column("shape")];
        if column("event") == "tag" && !column("delta_bytes").starts_with('-') {
            let name = format!("{}.{}", column("module"), column("name"));
            found.entry((name, column("category"))).or_default().push(form);
        }
    }
    found
}

fn types_and_shapes_are_those_of_torch(torch: &Torch) {
    let run = torch.trace(SCRIPT, &["40", "50", "60"]).expect_success();
    let expected: BTreeMap<String, [[String; 2]; 2]> =
        serde_json::from_str(&text(&run.output.stdout)).unwrap();
    let found = tagged(&run);
    let of = |name: &str, category: &str| found.get(&(name.to_owned(), category.to_owned()));
    for (name, [parameter, state]) in &expected {
        let mut parameter = parameter.clone();
        if name == "Net.part" {
            "?".clone_into(&mut parameter[1]);
        }
        assert_eq!(of(name, "parameter").unwrap(), &[parameter.clone()], "{name}");
        let whole = &expected[name][0];
        assert_eq!(of(name, "gradient").unwrap().iter().filter(|form| *form != whole).count(), 0, "{name}");
        assert_eq!(
            of(&format!("{name}.exp_avg"), "optimizer_state").unwrap(),
            std::slice::from_ref(state),
            "{name}"
        );
    }
    assert_eq!(expected["Net.scale"][0], ["bfloat16", "[]"]);
    assert_eq!(of("Net.position", "buffer").unwrap(), &[["int32".to_owned(), "[64x32]".to_owned()]]);

    // The groups of a report sum to the peak, with the blocks of unknown type.
    let answer = run.json("peak", &["--by", "dtype"]);
    let groups = answer["groups"].as_array().unwrap();
    let bytes = |name: &str| {
        let group = groups.iter().find(|group| group["key"] == name).unwrap();
        group["bytes"].as_i64().unwrap()
    };
    let sum: i64 = groups.iter().map(|group| group["bytes"].as_i64().unwrap()).sum();
    assert_eq!(
        sum,
        bytes("bfloat16") + bytes("float32") + bytes("(unknown dtype)") + bytes("int64") + bytes("int32")
    );
    let shapes = run.report("peak", &["--by", "shape"]);
    assert!(shapes.contains("bfloat16 [2048x2048]") && shapes.contains("float32 [2048]"), "{shapes}");
    let modules = run.json("modules", &[]);
    let of_net = &modules["processes"][0]["modules"][0];
    // Table, layer, its bias and `scale`; the norm's weight and bias, and the storage of `part`.
    let types = json!({"bfloat16": 409_600 + 8_388_608 + 4096 + 512, "float32": 2 * 8192 + 4096});
    assert_eq!((&of_net["module"], &of_net["parameter_types_bytes"]), (&json!("Net"), &types));
    let table = run.report("modules", &[]);
    assert!(table.contains("bfloat16 99.8 %, float32 0.2 %  Net\n"), "{table}");
    torch.check(memtrace().arg("check").arg(run.file()));
}

fn types_and_shapes_of_allocations_are_those_of_torch(torch: &Torch) {
    let run = torch.trace("tensor_types/allocated.py", &[]).expect_success();
    let expected: BTreeMap<String, [String; 2]> = serde_json::from_str(&text(&run.output.stdout)).unwrap();
    assert!(expected.len() > 40, "{}", expected.len());
    let mut reader = csv::Reader::from_path(run.file()).unwrap();
    let rows: Vec<BTreeMap<String, String>> = reader.deserialize().map(Result::unwrap).collect();
    for (address, form) in &expected {
        let last = rows.iter().rfind(|row| row["event"] == "alloc" && row["addr"] == *address).unwrap();
        assert_eq!([&last["dtype"], &last["shape"]], [&form[0], &form[1]], "{address}");
        let freed = rows.iter().find(|row| row["event"] == "free" && row["alloc_id"] == last["alloc_id"]);
        assert!(freed.is_none_or(|row| row["shape"] == form[1]), "{freed:?}");
    }
    let oom = rows.iter().find(|row| row["event"] == "oom").unwrap();
    assert_eq!([&oom["dtype"], &oom["shape"]], ["bfloat16", "[1024x3x16777216]"]);
    let form = "for bfloat16 [1024x3x16777216]";
    assert!(text(&run.output.stderr).contains(form), "{}", text(&run.output.stderr));
    let answer = run.report("oom", &[]);
    assert!(answer.contains(&format!("requested {form}; needs a segment")), "{answer}");
    torch.check(memtrace().arg("check").arg(run.file()));
}

fn the_step_with_the_largest_input_is_named_with_and_without_detail(torch: &Torch) {
    let lengths = ["40", "50", "45", "45", "45", "60", "50", "900", "45", "40", "45", "45"];
    let line = "step 7 has the largest input of the run: int64 [2x900] of Net; median [2x45]";
    for detail in ["full", "every:5"] {
        let run = torch.trace_with(SCRIPT, &lengths, &[("MEMTRACE_DETAIL", detail)]).expect_success();
        assert!(run.report("timeline", &[]).contains("input size  "));
        for report in ["summary", "leaks", "timeline"] {
            let printed = run.report(report, &[]);
            assert!(printed.contains(line), "{detail}, {report}: {printed}");
        }
        let answer = run.json("summary", &[]);
        let input = &answer["processes"][0]["largest_input"];
        assert_eq!((&input["step"], &input["shape"]), (&7.into(), &"[2x900]".into()));
    }
    let run = torch.trace(SCRIPT, &["40", "50", "45", "44"]).expect_success();
    assert!(!run.report("summary", &[]).contains("largest input"));
    assert_eq!(run.json("summary", &[])["processes"][0]["largest_input"]["shape"], "[2x50]");
}

fn types_of_packed_parts_name_the_type_they_stand_for(torch: &Torch) {
    let run = torch.trace("tensor_types/packed.py", &[]).expect_success();
    let found = tagged(&run);
    let weight = &found[&("Linear.weight".to_owned(), "parameter".to_owned())];
    let texts: Vec<String> = weight.iter().map(|form| form.join(" ")).collect();
    assert_eq!(texts, ["int8(bfloat16) [512x2048]", "bfloat16 [512]"]);
    // Few parameters are packed, so the others are what the peak holds.
    let summary = run.report("summary", &[]);
    let expected = "of this peak, beside 1.00 MiB of parameters in int8(bfloat16): parameter 390.62 MiB; most in \
                    Embedding. In 16 bits it would have 195.31 MiB less";
    assert!(summary.contains("float32 has 390.62 MiB") && summary.contains(expected), "{summary}");
    assert!(!summary.contains("parameters in 16 bits"), "{summary}");
    // Fused experts stay in 16 bits.
    let run = torch.trace("tensor_types/packed.py", &["512", "128"]).expect_success();
    let summary = run.report("summary", &[]);
    let expected = "beside 1.00 MiB in int8(bfloat16): most in Experts. Of these, 128.00 MiB are fused experts: quantizers \
                    pack nn.Linear layers only. Packed they would have about 64.00 MiB less";
    assert!(
        summary.contains("parameters in 16 bits have 128.00 MiB") && summary.contains(expected),
        "{summary}"
    );
}

/// The size of a tensor is an op under `torch.jit.trace`, and a comparison of symbolic sizes is a guard.
fn graphs_of_traced_models_get_no_op_and_no_guard(torch: &Torch) {
    let script = "tensor_types/traced.py";
    let plain = torch.untraced(script, &[]);
    assert!(plain.status.success(), "{}", text(&plain.stderr));
    let run = torch.trace(script, &[]).expect_success();
    assert_eq!(text(&run.output.stdout), text(&plain.stdout));
}
