package roles

import (
	"maps"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/decode"
	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/internal/obs/logs"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/kvtransfer"
	"github.com/tandem-serving/tandem/prefill"
)

// number gives every number within v another value, from next on.
func number(v reflect.Value, next *uint64) {
	switch v.Kind() {
	case reflect.Struct:
		if load := v.Addr().MethodByName("Store"); load.IsValid() { // an atomic
			*next++
			load.Call([]reflect.Value{reflect.ValueOf(*next).Convert(load.Type().In(0))})
			return
		}
		for i := range v.NumField() {
			number(v.Field(i), next)
		}
	case reflect.Array:
		for i := range v.Len() {
			number(v.Index(i), next)
		}
	case reflect.Int, reflect.Int64:
		*next++
		v.SetInt(int64(*next))
	case reflect.Uint64:
		*next++
		v.SetUint(*next)
	case reflect.Float64:
		*next++
		v.SetFloat(float64(*next))
	}
}

// series are the values of a scrape by name and own labels, without those that
// every row of vLLM's has.
func series(t *testing.T, set *metrics.Set) map[string]float64 {
	t.Helper()
	out := map[string]float64{}
	for line := range strings.Lines(string(set.Append(nil))) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		if !ok || name == "#" || !strings.HasPrefix(name, "vllm:") && !strings.HasPrefix(name, "tandem:") {
			continue
		}
		for _, common := range []string{`engine="0",`, `engine="0"`, `model_name="m",`, `,model_name="m"`, `model_name="m"`} {
			name = strings.Replace(name, common, "", 1)
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			t.Fatal(err)
		}
		out[strings.TrimSuffix(name, "{}")] = v
	}
	return out
}

// What the parts of a node count, each number another one, reaches the metric
// that says so, and every counter and gauge of a node is one of these.
func TestMeters(t *testing.T) {
	var st engine.Stats
	var dec decode.Counters
	var pre prefill.Counters
	var in kvtransfer.ReaderStats
	var out kvtransfer.WriterStats
	served, asked := new(rpc.Counters), new(rpc.Counters)
	next := uint64(1000)
	for _, p := range []any{&st, &dec, &pre, &in, &out, served, asked} {
		number(reflect.ValueOf(p).Elem(), &next)
	}
	st.Adapters = engine.AdapterUse{Running: []string{"a", "b"}, Waiting: []string{"c"}}
	sch, b := &st.Scheduler, &st.Scheduler.Blocks
	role := func(name string, roles metrics.Role) *NodeMetrics {
		n, l := &NodeMetrics{Set: metrics.New(roles, "m"), Stats: func() engine.Stats { return st }}, new(engine.Loaded)
		l.Scheduler.MaxQueued, l.Scheduler.MaxSeqs, l.Scheduler.Pool.BlockTokens, l.KV.Blocks, l.KV.DType, l.Adapters.Places = 901, 902, 16, 64, backend.BF16, 3
		n.Engine(l, "1.2.3", name)
		priceMetric(n.Set, 913.5)
		RPCMetrics(n.Set, served, asked)
		traceMetrics(n.Set, nil)
		return n
	}
	d, p := role("decode", metrics.Decode), role("prefill", metrics.Prefill)
	d.Decode(func() decode.Counters { return dec }, func() (int, int) { return 903, 904 },
		func(state string) int { return map[string]int{"closed": 908, "half-open": 909, "open": 910}[state] })
	d.Reader(func() kvtransfer.ReaderStats { return in })
	p.Prefill(func() prefill.Counters { return pre }, func() (int, int, int) { return 905, 906, 9999 }, func() int { return 912 }, 907, func() kvtransfer.WriterStats { return out })
	d.BlockEvents(func() uint64 { return 911 })

	both := map[string]any{
		`tandem:price_dollars_per_hour`:                                     913.5,
		`vllm:num_requests_running`:                                         sch.Running,
		`vllm:kv_cache_usage_perc`:                                          float64(b.Blocks-b.Free-b.Cached) / float64(b.Blocks),
		`vllm:prefix_cache_queries_total`:                                   sch.PrefixQueries,
		`vllm:prefix_cache_hits_total`:                                      sch.PrefixHits,
		`vllm:num_preemptions_total`:                                        sch.Preemptions,
		`vllm:prompt_tokens_total`:                                          st.Prompts.Computed + st.Prompts.Cached + st.Prompts.Arrived,
		`vllm:prompt_tokens_by_source_total{source="local_compute"}`:        st.Prompts.Computed,
		`vllm:prompt_tokens_by_source_total{source="local_cache_hit"}`:      st.Prompts.Cached,
		`vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}`: st.Prompts.Arrived,
		`vllm:prompt_tokens_cached_total`:                                   st.Prompts.Cached + st.Prompts.Arrived,
		`vllm:prompt_tokens_cached_by_source_total{source="device"}`:        sch.PrefixHits,
		`vllm:prompt_tokens_cached_by_source_total{source="p2p"}`:           sch.ExternalHits,
		`vllm:generation_tokens_total`:                                      st.Generated,
		`tandem:prefill_tokens_computed_total`:                              st.PromptComputed,
		`tandem:engine_steps_total`:                                         st.Steps,
		`tandem:kv_blocks{state="free"}`:                                    b.Free,
		`tandem:kv_blocks{state="cached"}`:                                  b.Cached,
		`tandem:kv_blocks{state="used"}`:                                    b.Used,
		`tandem:kv_blocks{state="pinned"}`:                                  b.Pinned,
		`tandem:kv_blocks_in_transfer{direction="in"}`:                      b.Arriving,
		`tandem:kv_blocks_in_transfer{direction="out"}`:                     b.Leaving,
		`tandem:queue_length{queue="engine_waiting"}`:                       sch.Waiting + sch.Held,
		`tandem:queue_length{queue="engine_running"}`:                       sch.Running,
		`tandem:queue_limit{queue="engine_waiting"}`:                        901,
		`tandem:queue_limit{queue="engine_running"}`:                        902,
		`tandem:rpc_frames_total{direction="in"}`:                           served.FramesIn.Load() + asked.FramesIn.Load(),
		`tandem:rpc_frames_total{direction="out"}`:                          served.FramesOut.Load() + asked.FramesOut.Load(),
		`tandem:rpc_bytes_total{direction="in"}`:                            served.BytesIn.Load() + asked.BytesIn.Load(),
		`tandem:rpc_bytes_total{direction="out"}`:                           served.BytesOut.Load() + asked.BytesOut.Load(),
		`tandem:rpc_outbox_full_total`:                                      served.OutboxFull.Load() + asked.OutboxFull.Load(),
		`tandem:rpc_silent_connections_total`:                               served.Silent.Load() + asked.Silent.Load(),
		`tandem:rpc_refused_connections_total`:                              served.Refused.Load() + asked.Refused.Load(),
		`tandem:rpc_forbidden_frames_total`:                                 served.Forbidden.Load() + asked.Forbidden.Load(),
		`tandem:rpc_dial_errors_total`:                                      served.DialErrors.Load() + asked.DialErrors.Load(),
		`tandem:rpc_connections`:                                            served.Conns.Load() + asked.Conns.Load(),
		`vllm:cache_config_info{block_size="16",cache_dtype="bfloat16",enable_prefix_caching="True",num_gpu_blocks="64"}`: 1,
	}
	onDecode := map[string]any{
		`tandem:build_info{role="decode",version="1.2.3"}`:               1,
		`vllm:num_requests_waiting`:                                      sch.Waiting + sch.Held,
		`vllm:num_requests_waiting_by_reason{reason="capacity"}`:         sch.Waiting,
		`vllm:num_requests_waiting_by_reason{reason="deferred"}`:         sch.Held,
		`vllm:num_requests_kv_fetch_by_stage{stage="waiting_to_start"}`:  sch.Held - sch.Fetching,
		`vllm:num_requests_kv_fetch_by_stage{stage="in_progress"}`:       sch.Fetching,
		`vllm:num_requests_kv_fetch_by_stage{stage="completed_waiting"}`: sch.Fetched,
		`vllm:external_prefix_cache_queries_total`:                       sch.ExternalQueries,
		`vllm:external_prefix_cache_hits_total`:                          sch.ExternalHits,
		`vllm:request_success_total{finished_reason="stop"}`:             dec.FinishedStop,
		`vllm:request_success_total{finished_reason="length"}`:           dec.FinishedLength,
		`vllm:request_success_total{finished_reason="abort"}`:            dec.FinishedAbort,
		`vllm:request_success_total{finished_reason="error"}`:            dec.FinishedError,
		`vllm:admission_rejections_total{reason="max_num_queued_reqs"}`:  sch.QueueFull + dec.Overloaded,
		`vllm:spec_decode_num_drafts_total`:                              sch.Drafts,
		`vllm:spec_decode_num_draft_tokens_total`:                        sch.Drafted,
		`tandem:grammar_masks_total{source="cached"}`:                    st.Masks.Cached,
		`tandem:grammar_masks_total{source="computed"}`:                  st.Masks.Computed,
		`tandem:grammar_steps_total`:                                     st.Masks.Steps,
		`tandem:grammar_sat_out_total`:                                   st.SatOut,
		`tandem:grammar_ended_total`:                                     st.Masks.Ended,
		`tandem:grammars`:                                                st.Masks.Grammars,
		`tandem:grammar_cache_bytes`:                                     st.Masks.Bytes,
		`tandem:grammar_waiting`:                                         st.Masks.Waiting,
		`tandem:decode_prefills_total{where="remote"}`:                   dec.RemotePrefills,
		`tandem:decode_prefills_total{where="local"}`:                    dec.LocalPrefills,
		`tandem:decode_prefill_failures_total`:                           dec.PrefillFailures,
		`tandem:decode_prefill_breakers{state="closed"}`:                 908,
		`tandem:decode_prefill_breakers{state="half-open"}`:              909,
		`tandem:decode_prefill_breakers{state="open"}`:                   910,
		`tandem:decode_dropped_streams_total`:                            dec.DroppedStreams,
		`tandem:decode_refused_total`:                                    dec.Refused,
		`tandem:kv_transfer_bytes_total{direction="in"}`:                 in.PayloadBytes,
		`tandem:kv_transfer_shared_bytes_total{direction="in"}`:          in.SharedBytes,
		`tandem:kv_transfer_rdma_bytes_total{direction="in"}`:            in.FabricBytes,
		`tandem:kv_transfer_pieces_total{direction="in"}`:                in.Pieces,
		`tandem:kv_transfers_total{direction="in"}`:                      in.LeasesArrived,
		`tandem:kv_transfer_failures_total{direction="in"}`:              in.LeasesFailed,
		`tandem:kv_leases{state="granted"}`:                              in.Granted,
		`tandem:kv_leases{state="arriving"}`:                             in.Arriving,
		`tandem:kv_leases{state="quarantined"}`:                          in.Quarantined,
		`tandem:kv_leases_expired_total`:                                 in.LeasesExpired,
		`tandem:fenced_writes_total{kind="stale"}`:                       in.StalePieces,
		`tandem:fenced_writes_total{kind="duplicate"}`:                   in.DuplicatePieces,
		`tandem:fenced_writes_total{kind="corrupt"}`:                     in.ChecksumFailures,
		`tandem:queue_length{queue="arriving_blocks"}`:                   b.Arriving,
		`tandem:queue_limit{queue="arriving_blocks"}`:                    sch.ArrivingLimit,
		`tandem:queue_length{queue="attempts"}`:                          903,
		`tandem:queue_limit{queue="attempts"}`:                           904,
		`tandem:block_events_dropped_total`:                              911,
		`tandem:decode_pressure`:                                         float64(sch.Running+sch.Waiting+sch.Held) / 902,
	}
	accepted := uint64(0)
	for place, tokens := range sch.Accepted {
		accepted += tokens
		onDecode[`vllm:spec_decode_num_accepted_tokens_per_pos_total{position="`+strconv.Itoa(place)+`"}`] = tokens
	}
	onDecode[`vllm:spec_decode_num_accepted_tokens_total`] = accepted
	onPrefill := map[string]any{
		`tandem:build_info{role="prefill",version="1.2.3"}`:             1,
		`vllm:num_requests_waiting`:                                     sch.Waiting + 905 + 906,
		`tandem:prefill_queue_seconds`:                                  float64(sch.Pending+912) / st.PromptRate,
		`vllm:num_requests_waiting_by_reason{reason="capacity"}`:        sch.Waiting + 905,
		`vllm:num_requests_waiting_by_reason{reason="deferred"}`:        906,
		`vllm:admission_rejections_total{reason="max_num_queued_reqs"}`: sch.QueueFull + pre.Overloaded,
		`tandem:prefill_jobs_total{result="done"}`:                      pre.Done,
		`tandem:prefill_jobs_total{result="cancelled"}`:                 pre.Cancelled,
		`tandem:prefill_jobs_total{result="failed"}`:                    pre.Failed,
		`tandem:prefill_jobs_total{result="refused"}`:                   pre.Refused,
		`tandem:kv_transfer_bytes_total{direction="out"}`:               out.PayloadBytes,
		`tandem:kv_transfer_shared_bytes_total{direction="out"}`:        out.SharedBytes,
		`tandem:kv_transfer_rdma_bytes_total{direction="out"}`:          out.FabricBytes,
		`tandem:kv_transfer_pieces_total{direction="out"}`:              out.Pieces,
		`tandem:kv_transfers_total{direction="out"}`:                    out.PushesDone,
		`tandem:kv_transfer_failures_total{direction="out"}`:            out.PushesFailed,
		`tandem:kv_transfer_retries_total`:                              out.Retries,
		`tandem:queue_length{queue="prefill_jobs"}`:                     905,
		`tandem:queue_limit{queue="prefill_jobs"}`:                      907,
		`tandem:queue_length{queue="pushes"}`:                           out.Pushes,
		`tandem:queue_limit{queue="pushes"}`:                            out.MaxPushes,
	}
	g := metrics.New(metrics.Gateway, "m")
	RPCMetrics(g, served, asked)
	for name, value := range series(t, g) {
		if want, rpc := both[name]; rpc && strings.HasPrefix(name, "tandem:rpc_") && value != reflect.ValueOf(want).Convert(reflect.TypeFor[float64]()).Float() {
			t.Errorf("gateway: %s is %v, want %v", name, value, want)
		}
	}
	// What other parts feed, and what a role never counts.
	elsewhere := map[string]bool{
		"tandem:certificate_expiry_timestamp_seconds": true, "tandem:accept_errors_total": true, "tandem:trace_spans_total": true, "tandem:block_events_dropped_total": true, "vllm:request_success_total": true,
		"tandem:engine_work_total": true, "tandem:engine_work_seconds_total": true,
		"tandem:kv_transfer_bytes_total": true, "tandem:kv_transfer_shared_bytes_total": true, "tandem:kv_transfer_rdma_bytes_total": true, "tandem:kv_transfer_pieces_total": true, "tandem:kv_transfers_total": true, "tandem:kv_transfer_failures_total": true,
	}
	for _, c := range []struct {
		role string
		n    *NodeMetrics
		want map[string]any
	}{{"decode", d, onDecode}, {"prefill", p, onPrefill}} {
		maps.Copy(c.want, both)
		got := series(t, c.n.Set)
		const adapters = `vllm:lora_requests_info{max_lora="3",running_lora_adapters="a,b",waiting_lora_adapters="c"}`
		if at := got[adapters]; math.Abs(at-float64(time.Now().Unix())) > 3600 {
			t.Errorf("%s: %s is %v, want the time", c.role, adapters, at)
		}
		delete(got, adapters)
		for _, name := range slices.Sorted(maps.Keys(c.want)) {
			v := reflect.ValueOf(c.want[name])
			if want := v.Convert(reflect.TypeFor[float64]()).Float(); got[name] != want {
				t.Errorf("%s: %s is %v, want %v", c.role, name, got[name], want)
			}
			delete(got, name)
		}
		for name, value := range got {
			row, _, _ := strings.Cut(name, "{")
			histogram := strings.HasSuffix(row, "_sum") || strings.HasSuffix(row, "_count") || strings.HasSuffix(row, "_bucket")
			if !histogram && !(elsewhere[row] && value == 0) {
				t.Errorf("%s: nobody has said that %s is %v", c.role, name, value)
			}
		}
	}
}

// TestCounts checks that each count of the log line of rates is the engine's or, once a role's side
// of transfers runs, that side's.
func TestCounts(t *testing.T) {
	var st engine.Stats
	var in kvtransfer.ReaderStats
	var out kvtransfer.WriterStats
	next := uint64(1000)
	for _, p := range []any{&st, &in, &out} {
		number(reflect.ValueOf(p).Elem(), &next)
	}
	sch, b := &st.Scheduler, &st.Scheduler.Blocks
	want := logs.Counts{
		PromptTokens: st.PromptComputed, GeneratedTokens: st.Generated,
		PrefixQueries: sch.PrefixQueries, PrefixHits: sch.PrefixHits, ExternalQueries: sch.ExternalQueries, ExternalHits: sch.ExternalHits,
		Preemptions: sch.Preemptions, Running: sch.Running, Waiting: sch.Waiting + sch.Held, Deferred: sch.Held,
		KVUsage: float64(b.Blocks-b.Free-b.Cached) / float64(b.Blocks),
	}
	node := func(roles metrics.Role) *NodeMetrics {
		return &NodeMetrics{Set: metrics.New(roles, "m"), Stats: func() engine.Stats { return st }}
	}
	d, p := node(metrics.Decode), node(metrics.Prefill)
	for name, n := range map[string]*NodeMetrics{"decode": d, "prefill": p} {
		if got := n.Counts(); got != want {
			t.Errorf("%s without transfers: %+v, want %+v", name, got, want)
		}
	}
	d.Reader(func() kvtransfer.ReaderStats { return in })
	p.Prefill(func() prefill.Counters { return prefill.Counters{} }, func() (int, int, int) { return 0, 0, 0 }, func() int { return 0 }, 1, func() kvtransfer.WriterStats { return out })
	KVSent(p.Set)(prefill.Transfer{Hidden: 3 * time.Second, Exposed: 2 * time.Second})
	received, sent := want, want
	received.Transfers, received.TransferFailures, received.TransferBytes = in.LeasesArrived, in.LeasesFailed, in.PayloadBytes
	sent.Transfers, sent.TransferFailures, sent.TransferBytes = out.PushesDone, out.PushesFailed, out.PayloadBytes
	sent.TransferHidden, sent.TransferExposed = 3*time.Second, 2*time.Second
	if got := d.Counts(); got != received {
		t.Errorf("decode: %+v, want %+v", got, received)
	}
	if got := p.Counts(); got != sent {
		t.Errorf("prefill: %+v, want %+v", got, sent)
	}
}

// The moments of a request's life, and what it was made of, reach the histograms.
func TestMetersOfALife(t *testing.T) {
	life := engine.RequestStats{Prompt: 120, Cached: 32, Arrived: 64, Output: 11, MaxTokens: 40, Preemptions: 3, Finish: engine.FinishLength,
		Added: 1 * time.Second, Admitted: 3 * time.Second, First: 6 * time.Second, Last: 10 * time.Second, Ended: 15 * time.Second}
	sums := map[string]float64{
		"vllm:request_queue_time_seconds": 2, "vllm:request_prefill_time_seconds": 3, "vllm:request_inference_time_seconds": 7,
		"vllm:request_num_preemptions": 3, "vllm:request_prefill_kv_computed_tokens": 24, "vllm:iteration_tokens_total": 77, "tandem:engine_step_seconds": 0.25,
	}
	request := map[string]float64{
		"vllm:time_to_first_token_seconds": 5, "vllm:inter_token_latency_seconds": 0.4, "vllm:request_time_per_output_token_seconds": 0.4,
		"vllm:e2e_request_latency_seconds": 14, "vllm:request_decode_time_seconds": 4, "vllm:request_prompt_tokens": 120,
		"vllm:request_generation_tokens": 11, "vllm:request_params_max_tokens": 40,
	}
	for name, c := range map[string]struct {
		roles metrics.Role
		life  func(*engine.RequestStats)
		want  []map[string]float64
	}{
		"decode":            {metrics.Decode, func(*engine.RequestStats) {}, []map[string]float64{sums, request}},
		"prefill":           {metrics.Prefill, func(l *engine.RequestStats) { l.Job = true }, []map[string]float64{sums}},
		"serve: once":       {metrics.Decode | metrics.Gateway, func(*engine.RequestStats) {}, []map[string]float64{sums}},
		"one that failed":   {metrics.Decode, func(l *engine.RequestStats) { l.Finish = engine.FinishError }, nil},
		"one that was left": {metrics.Decode, func(l *engine.RequestStats) { l.Finish = 0 }, nil},
	} {
		set, l := metrics.New(c.roles, "m"), life
		c.life(&l)
		w := WatchEngine(set)
		want := map[string]float64{}
		for _, sums := range c.want {
			for row, sum := range sums {
				want[row] = sum
			}
		}
		if len(want) > 0 { // what is told while it runs
			w.Step(scheduler.Shape{Chunk: 70, Streams: 7}, 250*time.Millisecond)
			if w.First != nil {
				w.First(5 * time.Second)
				w.Next(400 * time.Millisecond)
			}
		}
		w.OnFinish(l)
		for row, value := range series(t, set) {
			at, histogram := strings.CutSuffix(row, "_sum")
			if n, ok := strings.CutSuffix(row, "_count"); ok && value != 0 && value != 1 {
				t.Errorf("%s: %s counts %v", name, n, value)
			}
			if histogram && math.Abs(value-want[at]) > 1e-9 {
				t.Errorf("%s: %s adds up to %v, want %v", name, at, value, want[at])
			}
			delete(want, at)
		}
		if len(want) > 0 {
			t.Errorf("%s: nothing tells of %v", name, want)
		}
	}
	set := metrics.New(metrics.Decode, "m")
	for _, kind := range []kvtransfer.EventKind{kvtransfer.Arrived, kvtransfer.Failed, kvtransfer.Released} {
		KVReceived(set)(kvtransfer.Event{Kind: kind, FirstByte: time.Second, LastByte: 4 * time.Second})
	}
	if got := series(t, set); got["tandem:kv_transfer_first_byte_seconds_sum"] != 1 || got["tandem:kv_transfer_last_byte_seconds_sum"] != 4 {
		t.Errorf("a transfer whose bytes came from 1 s to 4 s is told as %v", got)
	}
	set = metrics.New(metrics.Prefill, "m")
	KVSent(set)(prefill.Transfer{Hidden: 3 * time.Second, Exposed: 2 * time.Second})
	if got := series(t, set); got["tandem:kv_transfer_hidden_seconds_sum"] != 3 || got["tandem:kv_transfer_exposed_seconds_sum"] != 2 {
		t.Errorf("a transfer of 3 s hidden and 2 s exposed is told as %v", got)
	}
}
