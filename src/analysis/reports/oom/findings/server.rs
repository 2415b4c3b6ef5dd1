//! A server (vLLM) that limits itself to a share of the card.

use memtrace_trace::units::Unit;

use super::super::finding::OomCase;

pub(super) fn remedy(case: &OomCase<'_>, _units: Unit) -> Option<String> {
    let (server, evidence) = (case.oom_state.whole.server?, &case.evidence);
    server.smaller_trial().or_else(|| server.less_cache(evidence.lacking(), evidence.device.capacity))
}

#[cfg(test)]
mod tests {
    use memtrace_trace::Api;

    use super::super::super::test_evidence::{GIB, MIB};
    use super::super::super::test_trace::{OomTrace, owner};

    fn trace(mark: &str) -> OomTrace {
        let mut trace = OomTrace::new(24 * GIB);
        trace.fill(512 * MIB, owner("LlamaForCausalLM", "forward", 0));
        trace.fails(GIB, owner("LlamaForCausalLM", "forward", 0));
        trace.mark(Api::Server.as_str(), mark, 0);
        trace
    }

    #[test]
    fn oom_advises_a_server_by_its_cache() {
        trace("vllm: gpu_memory_utilization=0.9 blocks=0 ended").prints(&[
            "try: vLLM: a smaller max_num_batched_tokens (and max_num_seqs), so that the trial forward needs less; \
             gpu_memory_utilization does not help, because it limits only the KV cache",
        ]);
        // Half a GiB is missing, 0.02 of the card.
        trace("vllm: gpu_memory_utilization=0.9 blocks=1000 ended").prints(&[
            "try: vLLM: gpu_memory_utilization=0.86 or less, now 0.9: the KV cache takes the rest of this share of the card; or a \
             smaller max_num_seqs",
        ]);
        // No server, one that may still get a cache, and a share that leaves nothing for a cache.
        trace("server: blocks=1000 ended").never_prints("vLLM");
        trace("vllm: gpu_memory_utilization=0.9 blocks=0").never_prints("vLLM");
        trace("vllm: gpu_memory_utilization=0.02 blocks=1000 ended").never_prints("vLLM");
    }
}
