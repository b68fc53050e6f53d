package config

import (
	"fmt"
	"time"

	"github.com/tandem-serving/tandem/internal/limits"
)

// Flags that several commands share are declared once, here. The structs hold
// what was resolved; Register binds them to a command.

// Model says which model a process loads, and how.
type Model struct {
	Path, ServedName, Device, Kernels, KVDType string
	Quantization                               string
	Revision, ChatTemplate                     string
	Threads, BlockTokens, MaxModelLen          int
	MaxSeqs, MaxBatchedTokens, MaxQueued       int
	KVMemory                                   Bytes
	CUDALibrary, NCCLLibrary                   string
	GPUMemory                                  float64
	EnforceEager, Ahead, OneOrder              bool
	TensorParallel                             int
	RankTimeout                                Seconds
	BLAS                                       string
	Speculation                                Speculation
	LoRA                                       LoRA
}

// Register declares the model's flags.
func (m *Model) Register(s *Set) {
	s.sides |= nodes
	s.StringVar(&m.Path, "model", "builtin", "Hugging Face folder, ORG/NAME of the local Hugging Face cache, or builtin")
	s.StringVar(&m.Revision, "revision", "", "branch, tag or commit of ORG/NAME; default: main")
	s.StringVar(&m.ChatTemplate, "chat-template", "", "file with a chat template instead of the model's own")
	s.StringVar(&m.ServedName, "served-model-name", "", "name in the API; default: the folder's name, or ORG/NAME")
	s.StringVar(&m.Device, "device", "auto", "auto (a GPU where kernels, driver and GPU are there, else the CPU), cpu, cuda or cuda:N")
	s.StringVar(&m.CUDALibrary, "cuda-library", "", "shared object with the kernels for GPUs, as make cuda builds it; default: tandem-cuda.so beside the program")
	s.StringVar(&m.NCCLLibrary, "nccl-library", "libnccl.so.2", "NCCL, by which --tensor-parallel-size has several GPUs compute a model")
	s.Float64Var(&m.GPUMemory, "gpu-memory-utilization", 0.9, "share of a GPU's memory to take; KV blocks get what weights and steps leave of it")
	s.BoolVar(&m.EnforceEager, "enforce-eager", false, "start a GPU's operations one by one instead of as graphs: slower, for comparison")
	s.StringVar(&m.BLAS, "cublaslt", "auto", "what multiplies more than 64 rows on a GPU: auto (cuBLASLt where it is installed, else own kernels), none, or the library's path")
	s.BoolVar(&m.OneOrder, "deterministic", false, "on a GPU: sums in one order, so that a request's logits have the same bits whichever others share its steps; slower. CPUs always do")
	s.BoolVar(&m.Ahead, "async-scheduling", true, "give a GPU the next step of decoding while one runs; false is for comparison. CPUs run one step after the other")
	s.StringVar(&m.Kernels, "cpu-kernels", "auto", "auto, or one that the processor has: avx512vnni, avx512, avxvnni, avx2, neon, generic or portable; amx is never chosen by auto, as it rounds what bf16 weights are multiplied with to bf16")
	s.StringVar(&m.Quantization, "quantization", "none", "what weights are turned into as they are loaded: none, int8 or int4, with a scale for each group of 32")
	s.CountVar(&m.Threads, "threads", 0, 0, "CPU threads of this node; 0: one per core, or what the cgroup's quota allows")
	s.Var(&m.KVMemory, "kv-cache-memory-bytes", "memory for KV blocks of each process that computes the model, taken as it is used; 0: 1GiB of all, or less where the machine's or the cgroup's memory is short")
	s.CountVar(&m.TensorParallel, "tensor-parallel-size", 1, 1, "processes of this machine that compute the model together, a part of each matrix each; on the CPU they share --threads")
	m.RankTimeout = Seconds(time.Minute)
	s.Var(&m.RankTimeout, "distributed-timeout-seconds", "how long one of them may let the others wait before the node ends")
	s.StringVar(&m.KVDType, "kv-cache-dtype", "auto", "auto (as the weights), float32 or bfloat16")
	s.CountVar(&m.BlockTokens, "block-size", 16, 1, "tokens per KV block")
	s.CountVar(&m.MaxModelLen, "max-model-len", 0, 0, "tokens of prompt and output; 0: what the model was made for")
	s.CountVar(&m.MaxSeqs, "max-num-seqs", 256, 1, "requests that run at once")
	s.CountVar(&m.MaxBatchedTokens, "max-num-batched-tokens", 512, 1, "tokens per step; more fills wide machines better, fewer keeps steps short")
	s.CountVar(&m.MaxQueued, "max-num-queued-reqs", 1024, 1, "requests that may wait for the engine")
	s.Var(&m.Speculation, "speculative-config", `guess tokens ahead, as in {"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":5,"prompt_lookup_min":3} or {"method":"draft_model","model":"./small","num_speculative_tokens":3}; answers are the same`)
	m.LoRA.Register(s)
}

// Process is what every long-running command has.
type Process struct {
	LogLevel        string
	LogFormat       string
	DisableLogStats bool
	TracesEndpoint  string
	ShutdownTimeout Seconds
}

// Register declares the process's flags.
func (p *Process) Register(s *Set) {
	s.StringVar(&p.LogLevel, "log-level", "info", "debug, info, warning or error")
	s.StringVar(&p.LogFormat, "log-format", "text", "text, lines in vLLM's manner, or json")
	s.BoolVar(&p.DisableLogStats, "disable-log-stats", false, "leave out the lines of rates")
	s.StringVar(&p.TracesEndpoint, "otlp-traces-endpoint", "", "collector that gets traces, as OTLP over HTTP, such as http://127.0.0.1:4318; default: what OTEL_EXPORTER_OTLP_ENDPOINT says")
	p.ShutdownTimeout = Seconds(30 * time.Second)
	s.Var(&p.ShutdownTimeout, "shutdown-timeout", "how long SIGTERM lets running requests finish")
}

// Cluster says how a process finds the others and proves that it belongs.
type Cluster struct {
	Name, TLSDir string
	Advertise    Address
	Join         []string
	GossipPort   int
	NATSURL      string
}

// Register declares the cluster's flags.
func (c *Cluster) Register(s *Set, gossipPort int) {
	s.StringVar(&c.Name, "node-name", "", "name in logs and status; default: role and a random suffix")
	s.StringVar(&c.TLSDir, "tls-dir", "", "folder with the cluster's certificates (see tandem ca)")
	s.Var(&c.Advertise, "advertise", "address that other nodes reach this one at; default: --host, or this machine's own")
	s.StringSliceVar(&c.Join, "join", nil, "host:port of any members' gossip, or a DNS name with all of them")
	s.PortVar(&c.GossipPort, "gossip-port", gossipPort, "port of gossip, TCP and UDP; 0: any")
	s.StringVar(&c.NATSURL, "nats-url", "", "NATS server to use instead of the gateways' own")
}

// Node is what prefill and decode nodes listen on.
type Node struct {
	Host                      string
	RPCPort, KVPort, HTTPPort int
	KVTLS                     bool
	KVTransport               string
	FabricProvider            string
	FabricAddress             string
	FabricLibrary             string
	KVConnections             int
	KVCongestion              string
}

// Register declares the node's flags.
func (n *Node) Register(s *Set, rpc, kv, http int) {
	s.StringVar(&n.Host, "host", "127.0.0.1", "address to listen on")
	s.PortVar(&n.RPCPort, "rpc-port", rpc, "port for requests from other nodes; 0: any")
	s.PortVar(&n.KVPort, "kv-port", kv, "port for KV blocks; 0: any (decode nodes)")
	s.PortVar(&n.HTTPPort, "http-port", http, "port of /metrics, /livez and /readyz; 0: any")
	s.StringVar(&n.KVTransport, "kv-transport", "auto", "how KV blocks travel: tcp; shm, between processes of one host, of which the decode node copies out of the prefill node's memory; rdma, by libfabric and in the clear, between nodes that both have it, else tcp; auto: shm where both ends can, else tcp")
	s.StringVar(&n.FabricProvider, "fabric-provider", "auto", "libfabric's provider for --kv-transport rdma, the same on all nodes: verbs, efa, tcp, shm (between processes of one host); auto: verbs or efa, whichever there is")
	s.StringVar(&n.FabricAddress, "fabric-address", "", "address or host name of the interface for --kv-transport rdma, which other nodes reach; empty: --host, unless that is all interfaces")
	s.StringVar(&n.FabricLibrary, "fabric-library", "libfabric.so.1", "libfabric for --kv-transport rdma, where the system's loader does not find the one that is meant, as EFA's under /opt/amazon/efa/lib")
	s.IntVar(&n.KVConnections, "kv-connections", 2, "connections for KV blocks to each decode node, beside one for control; 1 to 16 (prefill nodes)")
	s.StringVar(&n.KVCongestion, "kv-congestion-control", "", "TCP's congestion control for KV blocks, as the kernel names it, such as bbr where a far link loses packets; empty: the kernel's default (prefill nodes)")
	s.BoolVar(&n.KVTLS, "kv-tls", false, "encrypt KV blocks on their way; the same on all nodes")
}

// Upstreams are servers of another kind behind a gateway.
type Upstreams struct {
	URLs               []string
	Prefill, Decode    []string
	Protocol           string
	KubernetesAPI      string
	BootstrapPort      int
	APIKey, CAFile     string
	HealthPath         string
	ForwardCredentials bool
	MaxRequests        int
	Tokenizers         []string // FOLDER or MODEL=FOLDER
}

// Register declares the flags of upstreams.
func (u *Upstreams) Register(s *Set) {
	s.StringSliceVar(&u.URLs, "upstream", nil, "OpenAI-compatible server (vLLM, SGLang, ...) to put the gateway in front of: http(s)://HOST:PORT; dns:HOST:PORT, srv:NAME or k8s:NAMESPACE/SERVICE:PORT for several (dns+https:… with TLS); without --tls-dir there is no cluster of nodes beside them")
	s.StringSliceVar(&u.Prefill, "upstream-prefill", nil, "the same, of servers that compute prompts for those of --upstream-decode")
	s.StringSliceVar(&u.Decode, "upstream-decode", nil, "the same, of servers that answer from prompts computed by those of --upstream-prefill")
	s.StringVar(&u.Protocol, "upstream-protocol", "vllm", "how the two are joined: vllm (kv_transfer_params) or sglang (bootstrap rooms)")
	s.PortVar(&u.BootstrapPort, "upstream-bootstrap-port", 0, "bootstrap port of SGLang's prefill servers; 0: they are asked")
	s.StringVar(&u.KubernetesAPI, "kubernetes-api", "", "URL of the API that k8s: asks, such as kubectl proxy's http://127.0.0.1:8001; default: that of the pod's cluster")
	s.StringVar(&u.APIKey, "upstream-api-key", "", "bearer token for them")
	s.Secret("upstream-api-key")
	s.StringVar(&u.CAFile, "upstream-ca-file", "", "authorities of their certificates, PEM; default: the system's")
	s.StringVar(&u.HealthPath, "upstream-health-path", "/health", "path that says whether one is well; below 500 is")
	s.CountVar(&u.MaxRequests, "upstream-max-requests", 0, 0, "choices that a model's upstreams are given at once, each so many; further requests wait in the gateway as they do for nodes (--max-queued-requests, --queue-timeout); 0: any number")
	s.StringSliceVar(&u.Tokenizers, "tokenizer", nil, "folder with the tokenizer.json and the chat template of upstreams' models, such as a checkpoint's: prompts are routed by blocks of their tokens, as they are to nodes, instead of by their first bytes; MODEL=FOLDER for one of several models; a prompt that it cannot turn into tokens goes by its bytes")
	s.BoolVar(&u.ForwardCredentials, "upstream-forward-authorization", false, "send clients' Authorization and X-Api-Key on to them")
}

// Gateway is the client side.
type Gateway struct {
	limits.Limits
	Host, SSLCert, SSLKey string
	SSLCA                 string
	SSLCertReqs           int
	Port, NATSPort        int
	APIKeys               []string
	APIKeyFile            string
	Insecure              bool
	AdminListen           string
	AllowedOrigins        Origins
	SpecialTokens         SpecialTokens
	AllowedHosts          []string
	LogRequests           bool
	MaxLogLen             int
	MinRemotePrefill      int
	StallTimeout          time.Duration
	NodeSilence           time.Duration
	Policy                string
	MaxConns              int
	StreamTokens          int
}

// Any says whether there are upstreams.
func (u *Upstreams) Any() bool { return len(u.URLs)+len(u.Prefill)+len(u.Decode) > 0 }

// Register declares the client side's flags.
func (g *Gateway) Register(s *Set, minRemotePrefill int) {
	s.sides |= gateways
	g.Limits, g.StallTimeout, g.NodeSilence = limits.Default(), limits.StallTimeout, limits.NodeSilence
	s.StringVar(&g.Host, "host", limits.Host, "address to listen on for clients")
	s.PortVar(&g.Port, "port", limits.Port, "port to listen on for clients")
	s.StringVar(&g.SSLCert, "ssl-certfile", "", "certificate for clients, PEM")
	s.StringVar(&g.SSLKey, "ssl-keyfile", "", "its key, PEM")
	s.StringVar(&g.SSLCA, "ssl-ca-certs", "", "authorities of clients' certificates, PEM; with --ssl-cert-reqs")
	s.CountVar(&g.SSLCertReqs, "ssl-cert-reqs", 0, 0, "certificates of clients: 0 none, 1 checked if they have one, 2 required")
	s.BoolVar(&g.Insecure, "insecure", false, "serve clients beyond loopback without certificates")
	s.Var(&g.AllowedOrigins, "allowed-origins", `origins of web pages that may use the API from a browser, as in ["https://app.example"]; "*": any, on gateways with API keys; default: the gateway's own`)
	s.StringSliceVar(&g.AllowedHosts, "allowed-hosts", nil, "names by which clients may reach a gateway without API keys, or anyone --admin-listen, beside IP addresses, localhost, --host and the host of --admin-listen; *: any. Others get 403, so that no web page can pose as the gateway by DNS")
	g.SpecialTokens = AllowSpecialTokens
	s.Var(&g.SpecialTokens, "special-tokens-in-content", "text such as <|im_end|> in chat messages of users and tools: allow makes it the model's control token, as Hugging Face tokenizers do; reject answers 400. For models of nodes; upstreams decide for themselves")
	s.StringVar(&g.AdminListen, "admin-listen", "", "host:port that serves metrics and the log level instead of --port")
	s.BoolVar(&g.LogRequests, "enable-log-requests", false, "log a line for each request, without its text")
	s.CountVar(&g.MaxLogLen, "max-log-len", 0, 0, "characters of the prompt in that line; 0: none")
	s.StringSliceVar(&g.APIKeys, "api-key", nil, "bearer tokens that clients must present, any of them")
	s.Secret("api-key")
	s.StringVar(&g.APIKeyFile, "api-key-file", "", "file with a key a line, KEY or sha256:HEX, then name=N concurrency=N tokens-per-second=N weight=N priority=N admin=yes as wanted; read again when it changes")
	s.CountVar(&g.MaxQueuedRequests, "max-queued-requests", g.MaxQueuedRequests, 1, "requests that may wait in the gateway while the fleet has no room; beyond, they get 429")
	s.CountVar(&g.MaxQueuedTokens, "max-queued-tokens", g.MaxQueuedTokens, 1, "tokens that the prompts of those may have; beyond, requests get 429")
	s.SecondsVar(&g.QueueTimeout, "queue-timeout", false, "how long a request waits there, at most what it gives itself in the header X-Tandem-Timeout; one that would wait longer is refused at once")
	s.CountVar(&g.NodeBacklog, "node-backlog-requests", g.NodeBacklog, 1, "requests that wait on a decode node beside those that it runs; the others wait in the gateway")
	s.SecondsVar(&g.NodeBacklogTime, "node-backlog-time", true, "prompts that wait on nodes, in time to compute them; the others wait in the gateway")
	s.CountVar(&g.MinRemotePrefill, "min-remote-prefill-tokens", minRemotePrefill, 0, "prompts with fewer tokens to compute are prefilled on the decode node")
	s.SecondsVar(&g.RequestTimeout, "request-timeout", false, "longest life of a request")
	s.StringVar(&g.Policy, "policy", "prefix", "how nodes are chosen: prefix, consistent_hash, least_load, power_of_two, round_robin or session; the header X-Tandem-Policy overrides it")
	s.SecondsVar(&g.ResumeTimeout, "resume-timeout", true, "how long a stream whose decode node died waits for another")
	s.SecondsVar(&g.StallTimeout, "stall-timeout", true, "a decode node that has work and makes no step for so long loses it to others; 0: never")
	s.SecondsVar(&g.NodeSilence, "node-silence", true, "a decode node whose heartbeats are missing for so long loses its streams to others, at most half of the nodes within 10s; at least 1s; 0: never")
	s.CountVar(&g.MaxAttempts, "max-attempts", g.MaxAttempts, 1, "nodes that take a request in a row without a token from any")
	s.SizeVar(&g.MaxBodyBytes, "max-request-body", false, "largest request body")
	s.SizeVar(&g.MaxBodyMemory, "max-body-memory", true, "memory of all large request bodies and of parsing them, arriving or being answered; beyond, requests get 429; 0: no bound")
	s.SecondsVar(&g.HeaderTimeout, "header-timeout", false, "how long a request's head may take to arrive")
	s.SizeVar(&g.MinBodyRate, "min-body-rate", true, "bytes of a request that must arrive a second, on average from its start, once --header-timeout is over; 0: any")
	s.CountVar(&g.MaxN, "max-n", g.MaxN, 1, "choices (n) that a request may ask for; at most 128")
	s.CountVar(&g.MaxPromptTokens, "max-prompt-tokens", g.MaxPromptTokens, 0, "tokens that a prompt may have; 0: what the model takes")
	s.CountVar(&g.MaxInFlight, "max-requests", g.MaxInFlight, 1, "requests that are answered at once, waiting ones included; beyond, they get 503")
	s.CountVar(&g.MaxConns, "max-connections", limits.MaxConns, 1, "connections of clients; for one more, the connection longest without a request is closed; at most what the limit on file descriptors leaves")
	s.CountVar(&g.MaxConnsPerAddress, "max-connections-per-address", g.MaxConnsPerAddress, 0, "connections of one client address (of IPv6 its first 64 bits); beyond, they get 429; 0: no bound, as behind a proxy")
	s.SecondsVar(&g.SlowClientTimeout, "slow-client-timeout", false, "how long a client may take nothing of its answer before it is given up")
	s.CountVar(&g.StreamTokens, "stream-buffer-tokens", limits.StreamTokens, 1, "tokens of a choice that may wait for a slow client before its generation pauses")
	s.RateVar(&g.RetriesPerSecond, "retries-per-second", "attempts that failed before their first token and are tried elsewhere, of all requests together; bursts of ten seconds' worth")
	s.RateVar(&g.ResumesPerSecond, "resumes-per-second", "streams whose node was lost that look for another, of all together; the others follow in turn")
	s.CountVar(&g.MaxLogprobs, "max-logprobs", g.MaxLogprobs, 1, "best tokens whose log-probabilities a request may ask for with each token; at most 256")
}

// SpecialTokens says what becomes of special tokens in chat messages.
type SpecialTokens string

// Values of SpecialTokens.
const (
	AllowSpecialTokens  SpecialTokens = "allow"
	RejectSpecialTokens SpecialTokens = "reject"
)

// String returns the word.
func (t *SpecialTokens) String() string { return string(*t) }

// Set takes one of the words.
func (t *SpecialTokens) Set(v string) error {
	if v != string(AllowSpecialTokens) && v != string(RejectSpecialTokens) {
		return fmt.Errorf("%q: want allow or reject", v)
	}
	*t = SpecialTokens(v)
	return nil
}

// Type names the value in help texts.
func (t *SpecialTokens) Type() string { return "string" }
