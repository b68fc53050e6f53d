package roles

import (
	"fmt"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/gateway"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/cli"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/kubernetes"
	"github.com/tandem-serving/tandem/internal/limits"
	"github.com/tandem-serving/tandem/internal/obs/logs"
	"github.com/tandem-serving/tandem/internal/process"
	"github.com/tandem-serving/tandem/internal/tlsconf"
	"github.com/tandem-serving/tandem/kvtransfer"
	"github.com/tandem-serving/tandem/kvtransfer/fabric"
)

// Flags that several commands share are declared once, here, into the options of the packages
// that use them. Other values have fields of their own next to those options.

// processFlags are those of every long-running command.
type processFlags struct {
	process.Options
	quietStats      bool
	traces          string // URL of a collector
	price           float64
	shutdownTimeout time.Duration
}

func (p *processFlags) register(s *config.Set) {
	s.Section("Log, traces and shutdown")
	s.Values("log-level", logs.Levels...)
	s.Values("log-format", "text", "json")
	s.StringVar(&p.LogLevel, "log-level", "info", "debug, info, warning or error")
	s.StringVar(&p.LogFormat, "log-format", "text", "text, lines in vLLM's format, or json")
	s.BoolVar(&p.quietStats, "disable-log-stats", false, "do not log throughput every 10 seconds")
	s.StringVar(&p.traces, "otlp-traces-endpoint", "", "URL of a collector for traces, OTLP over HTTP, such as http://127.0.0.1:4318; default: OTEL_EXPORTER_OTLP_ENDPOINT")
	s.Float64Var(&p.price, "price-per-hour", 0, "US dollars for an hour of this process's machine or GPUs, which metrics and the dashboard divide by tokens; of tandem up: of each process")
	p.shutdownTimeout = 30 * time.Second
	s.SecondsVar(&p.shutdownTimeout, "shutdown-timeout", false, "how long running requests may take after SIGTERM")
}

// clusterFlags configure how a process joins the cluster.
type clusterFlags struct {
	advertise  string
	join       []string
	gossipPort int
	natsURL    string
}

func (c *clusterFlags) register(s *config.Set, p *process.Options, gossipPort int) {
	s.Section("Cluster")
	s.StringVar(&p.Name, "node-name", "", "name in logs, status and metrics, best one that no other node has; default: the name in the certificate of --tls-dir, else the host's")
	s.StringVar(&p.TLSDir, "tls-dir", "", "folder with the cluster's certificates (see tandem ca)")
	s.AddressVar(&c.advertise, "advertise", "address at which other nodes reach this one; default: --host, or this machine's address")
	s.StringSliceVar(&c.join, "join", nil, "host:port of the gossip of any members, or a DNS name with all of them")
	s.PortVar(&c.gossipPort, "gossip-port", gossipPort, "port of gossip, TCP and UDP; 0: any")
	s.StringVar(&c.natsURL, "nats-url", "", "URL of a NATS server to use instead of the gateways' embedded ones")
}

// nodeFlags configure the listeners of prefill and decode nodes, and the KV transfer.
type nodeFlags struct {
	host                      string
	rpcPort, kvPort, httpPort int
	tls                       bool
	transport                 string
	fabric                    fabric.Options
	writer                    kvtransfer.WriterOptions
}

func (n *nodeFlags) register(s *config.Set, rpc, kv, http int) {
	s.Section("Cluster")
	n.host = "127.0.0.1"
	s.HostVar(&n.host, "host", "address to listen on")
	s.PortVar(&n.rpcPort, "rpc-port", rpc, "port for requests from other nodes; 0: any")
	s.PortVar(&n.kvPort, "kv-port", kv, "port for KV blocks; 0: any (decode nodes)")
	s.PortVar(&n.httpPort, "http-port", http, "port of /metrics, /livez and /readyz; 0: any")
	s.Section("KV transfer")
	s.Values("kv-transport", "auto", "tcp", "shm", "rdma")
	s.Values("fabric-provider", append([]string{"auto"}, fabric.Providers...)...)
	s.StringVar(&n.transport, "kv-transport", "auto", "transport of KV blocks: tcp; shm, between processes of one host: the decode node copies from the prefill node's memory; rdma, by libfabric and unencrypted, between nodes that both have it, else tcp; auto: shm if both ends can, else tcp")
	s.StringVar(&n.fabric.Provider, "fabric-provider", "auto", "libfabric's provider for --kv-transport rdma, the same on all nodes: verbs, efa, tcp, shm (between processes of one host); auto: verbs or efa, whichever is installed")
	s.StringVar(&n.fabric.Address, "fabric-address", "", "address or host name of the interface for --kv-transport rdma, reachable from other nodes; empty: --host, unless that is all interfaces")
	s.StringVar(&n.fabric.Library, "fabric-library", "libfabric.so.1", "path of libfabric for --kv-transport rdma, if the system's loader finds another one, such as EFA's in /opt/amazon/efa/lib")
	s.IntVar(&n.writer.Connections, "kv-connections", 2, "connections for KV blocks to each decode node, in addition to one for control; 1 to 16 (prefill nodes)")
	s.StringVar(&n.writer.CongestionControl, "kv-congestion-control", "", "TCP congestion control for KV blocks, by the kernel's name, such as bbr for distant links with loss; empty: the kernel's default (prefill nodes)")
	s.BoolVar(&n.tls, "kv-tls", false, "encrypt the transfer of KV blocks; the same on all nodes")
}

// upstreamFlags configure the upstreams of a gateway.
type upstreamFlags struct {
	gateway.Upstreams
	urls, prefill, decode []string
	protocol              string
	kubernetes            kubernetes.Options
	bootstrapPort         int
	caFile                string
	tokenizers            []string // FOLDER or MODEL=FOLDER
}

func (u *upstreamFlags) register(s *config.Set, l *limits.Limits) {
	s.Section("Upstreams")
	s.Values("upstream-protocol", "vllm", "sglang")
	s.StringSliceVar(&u.urls, "upstream", nil, "OpenAI-compatible server (vLLM, SGLang, ...) to put the gateway in front of: http(s)://HOST:PORT; dns:HOST:PORT, srv:NAME or k8s:NAMESPACE/SERVICE:PORT for several (dns+https:… with TLS); without --tls-dir there is no cluster of nodes")
	s.StringSliceVar(&u.prefill, "upstream-prefill", nil, "as --upstream: servers that prefill for those of --upstream-decode")
	s.StringSliceVar(&u.decode, "upstream-decode", nil, "as --upstream: servers that decode after those of --upstream-prefill")
	s.StringVar(&u.protocol, "upstream-protocol", "vllm", "protocol between the two: vllm (kv_transfer_params) or sglang (bootstrap rooms)")
	s.PortVar(&u.bootstrapPort, "upstream-bootstrap-port", 0, "bootstrap port of SGLang's prefill servers; 0: the gateway asks them")
	cli.KubernetesFlags(s, &u.kubernetes, "k8s: upstreams")
	s.StringVar(&u.APIKey, "upstream-api-key", "", "bearer token for upstreams")
	s.Secret("upstream-api-key")
	s.StringVar(&u.caFile, "upstream-ca-file", "", "certificate authorities of upstreams, PEM; default: the system's")
	s.StringVar(&u.HealthPath, "upstream-health-path", "/health", "path of the health check of an upstream, which is up if the status is below 300, 401 or 403; after another status below 500 it is up if /v1/models lists models")
	s.CountVar(&l.UpstreamRequests, "upstream-max-requests", 0, 0, "choices in flight at each upstream of a model; further requests wait in the gateway as they do for nodes (--max-queued-requests, --queue-timeout); 0: no limit")
	s.StringSliceVar(&u.tokenizers, "tokenizer", nil, "folder with the tokenizer.json and the chat template of upstreams' models, such as a checkpoint: prompts are routed by blocks of their tokens, as they are to nodes, instead of by their first bytes; MODEL=FOLDER for one of several models; a prompt that cannot be tokenized is routed by its bytes")
	s.BoolVar(&u.ForwardAuthorization, "upstream-forward-authorization", false, "forward clients' credentials to upstreams: Authorization, X-Api-Key, Api-Key and cookies")
}

// any reports whether there are upstreams.
func (u *upstreamFlags) any() bool { return len(u.urls)+len(u.prefill)+len(u.decode) > 0 }

// gatewayFlags configure a gateway.
type gatewayFlags struct {
	gateway.Options
	clients     tlsconf.ClientFiles
	certReqs    int
	insecure    bool
	adminListen string
	cert        *tlsconf.Listener // for clients; set by check, nil for plain HTTP
	structured  config.StructuredOutputs
	toolCalls   bool
	planner     plannerFlags
}

func (g *gatewayFlags) register(s *config.Set, minRemotePrefill int) {
	s.ForGateways()
	g.Limits, g.StallTimeout, g.NodeSilence = limits.Default(), limits.StallTimeout, limits.NodeSilence
	l := &g.Limits
	s.Section("API")
	s.Values("policy", strings.Split(route.Policies(), ", ")...)
	g.Host = limits.Host
	s.HostVar(&g.Host, "host", "address to listen on for clients")
	s.PortVar(&g.Port, "port", limits.Port, "port to listen on for clients")
	s.StringVar(&g.clients.Cert, "ssl-certfile", "", "certificate for clients, PEM")
	s.StringVar(&g.clients.Key, "ssl-keyfile", "", "key of --ssl-certfile, PEM")
	s.StringVar(&g.clients.CA, "ssl-ca-certs", "", "certificate authorities of clients, PEM; with --ssl-cert-reqs")
	s.CountVar(&g.certReqs, "ssl-cert-reqs", 0, 0, "client certificates: 0 none, 1 verified if sent, 2 required")
	s.BoolVar(&g.insecure, "insecure", false, "serve clients beyond loopback without certificates")
	s.OriginsVar(&g.AllowedOrigins, "allowed-origins", `origins of web pages that may use the API from a browser, as in ["https://app.example"]; "*": any, on gateways with API keys; default: the gateway's own`)
	s.StringSliceVar(&g.AllowedHosts, "allowed-hosts", nil, "Host names accepted by a gateway without API keys and by --admin-listen, in addition to IP addresses, localhost, --host and the host of --admin-listen; *: any. Others get 403, as protection against DNS rebinding")
	s.BoolVar(&g.KeepModels, "keep-models", false, "keep the names of models whose nodes are all gone: requests wait for a node up to --queue-timeout and then get 503, so that pools can start from none")
	s.ChoiceVar(&g.RejectSpecialTokens, "special-tokens-in-content", "allow", "reject", "special tokens such as <|im_end|> in chat messages of users and tools: allow makes them control tokens, as Hugging Face tokenizers do; reject answers 400. For models of nodes only")
	s.StringVar(&g.ToolCallParser, "tool-call-parser", "", "format of the models' tool calls, by vLLM's name; none: calls are not read; default: the one in which each model's chat template writes calls. For models of nodes only")
	s.StringVar(&g.ReasoningParser, "reasoning-parser", "", "format of the models' reasoning, by vLLM's name; none: it stays in the content; default: the one of each model's chat template. For models of nodes only")
	s.BoolVar(&g.toolCalls, "enable-auto-tool-choice", true, "read tool calls of models whose format is known; false: requests with tools get 400 unless tool_choice is none")
	s.BoolVar(&g.TrustTemplates, "trust-request-chat-template", false, "run the chat templates that requests bring (chat_template), with at most 1,000,000 steps and as much output as the context holds; false: requests with one get 400. For models of nodes only")
	s.BoolVar(&g.TokenizerInfo, "enable-tokenizer-info-endpoint", false, "serve /tokenizer_info: the tokenizer's configuration and the chat template of nodes' models")
	s.StringVar(&g.adminListen, "admin-listen", "", "host:port that serves metrics and the log level instead of --port")
	s.BoolVar(&g.LogRequests, "enable-log-requests", false, "log a line for each request, without its text")
	s.CountVar(&g.LogPromptText, "max-log-len", 0, 0, "characters of the prompt in the line of --enable-log-requests; 0: none")
	s.StringSliceVar(&g.APIKeys, "api-key", nil, "bearer tokens, one of which clients must send")
	s.Secret("api-key")
	s.Check(func() error { return checkKeys(s, g.APIKeys) })
	s.StringVar(&g.APIKeyFile, "api-key-file", "", "file with a key per line, KEY or sha256:HEX, then optionally name=N concurrency=N tokens-per-second=N weight=N priority=N admin=yes; reloaded when it changes")
	s.StringVar(&g.ResponseKeyFile, "response-key-file", "", "file with a secret of at least 32 characters per line, for reasoning.encrypted_content of /v1/responses: the first line encrypts, all lines decrypt, the same on all gateways; default: a key of the cluster's, or of this process in a gateway without a cluster")
	s.Section("Queue and routing")
	s.CountVar(&l.MaxQueuedRequests, "max-queued-requests", l.MaxQueuedRequests, 1, "requests that may wait in the gateway while the fleet is full; further ones get 429")
	s.CountVar(&l.MaxQueuedTokens, "max-queued-tokens", l.MaxQueuedTokens, 1, "prompt tokens of the waiting requests; further requests get 429")
	s.SecondsVar(&l.QueueTimeout, "queue-timeout", false, "how long a request may wait in the gateway; the header X-Tandem-Timeout may shorten it. A request that would wait longer is refused at once")
	s.CountVar(&l.NodeBacklog, "node-backlog-requests", l.NodeBacklog, 1, "requests that wait on a decode node in addition to the running ones; further ones wait in the gateway")
	s.SecondsVar(&l.NodeBacklogTime, "node-backlog-time", true, "prompts that wait on nodes, measured in the time to compute them; further ones wait in the gateway")
	s.CountVar(&g.MinRemotePrefillTokens, "min-remote-prefill-tokens", minRemotePrefill, 0, "prompts with fewer uncached tokens are prefilled on the decode node")
	s.SecondsVar(&l.RequestTimeout, "request-timeout", false, "longest duration of a request")
	s.StringVar(&g.Policy, "policy", "prefix", "routing policy: prefix, consistent_hash, least_load, power_of_two, round_robin or session; the header X-Tandem-Policy overrides it")
	s.SecondsVar(&l.ResumeTimeout, "resume-timeout", true, "how long a stream waits for another decode node after its node died")
	s.SecondsVar(&g.StallTimeout, "stall-timeout", true, "time after which streams move from a decode node that makes no step; 0: never")
	s.SecondsVar(&g.NodeSilence, "node-silence", true, "time after which streams move from a decode node without heartbeats, at most from half of the nodes within 10s; at least 1s; 0: never")
	s.Section("Limits of requests and clients")
	s.CountVar(&l.MaxAttempts, "max-attempts", l.MaxAttempts, 1, "nodes on which a request is tried without receiving a token")
	s.SizeVar(&l.MaxBodyBytes, "max-request-body", false, "largest request body")
	s.SizeVar(&l.MaxBodyMemory, "max-body-memory", true, "memory of all large request bodies, of parsing them, and of answers with vectors or log-probabilities of prompts; further requests get 429; 0: no limit")
	s.SecondsVar(&l.HeaderTimeout, "header-timeout", false, "how long the head of a request may take to arrive")
	s.SizeVar(&l.MinBodyRate, "min-body-rate", true, "bytes per second of a request that must arrive, on average since its start, after --header-timeout; 0: no minimum")
	s.CountVar(&l.MaxN, "max-n", l.MaxN, 1, "most choices (n) of a request; at most 128")
	s.CountVar(&l.MaxPromptTokens, "max-prompt-tokens", l.MaxPromptTokens, 0, "most tokens of a prompt; 0: the model's limit")
	s.CountVar(&l.MaxInFlight, "max-requests", l.MaxInFlight, 1, "requests in flight, waiting ones included; further ones get 503")
	s.CountVar(&g.MaxConns, "max-connections", limits.MaxConns, 1, "connections of clients; a further one replaces the connection that has been idle longest; lowered to fit the limit on file descriptors")
	s.CountVar(&l.MaxConnsPerAddress, "max-connections-per-address", l.MaxConnsPerAddress, 0, "connections of one client address (IPv6: the first 64 bits); further ones get 429; 0: no limit, as behind a proxy")
	s.SecondsVar(&l.SlowClientTimeout, "slow-client-timeout", false, "how long a client may read nothing of its answer before the request is aborted")
	s.SecondsVar(&l.SSEKeepAlive, "sse-keep-alive", true, "silence in a stream after which the client gets a comment, so that no proxy closes the connection; 0: never")
	s.BoolVar(&l.SSEEarlyHead, "sse-early-head", false, "send the head of a stream that still waits for its first token after --sse-keep-alive, and comments from then on; a refusal after that is an error event in place of an HTTP status")
	s.Check(func() error {
		if l.SSEEarlyHead && l.SSEKeepAlive <= 0 {
			return fmt.Errorf("%w: --sse-early-head sends the head of a stream after --sse-keep-alive, which is 0 (never): set it to a time such as 10s", config.ErrValue)
		}
		return nil
	})
	s.CountVar(&g.StreamTokens, "stream-buffer-tokens", limits.StreamTokens, 1, "tokens of a choice that are buffered for a slow client before its generation pauses")
	s.RateVar(&l.RetriesPerSecond, "retries-per-second", "retries on another node before the first token, of all requests together; bursts of ten seconds' worth")
	s.RateVar(&l.ResumesPerSecond, "resumes-per-second", "streams per second that move to another node after theirs was lost; the others follow in turn")
	s.Var(&g.structured, "structured-outputs-config", `as in {"backend":"auto","disable_any_whitespace":true}: no whitespace between the JSON tokens of constrained answers`)
	s.SizeVar(&l.MaxGrammarBytes, "max-grammar-bytes", false, "largest JSON Schema, regular expression or grammar of a constrained request (response_format, structured_outputs); at most 1MiB")
	s.CountVar(&l.MaxMaskSteps, "max-mask-steps", l.MaxMaskSteps, 1000, "counted steps of computing the mask of one token of a constrained request; beyond them the request ends with an error, on every node at the same token")
	s.CountVar(&l.GrammarCompiles, "grammar-compiles", l.GrammarCompiles, 1, "grammars that the gateway compiles at once, to refuse those that cannot be followed")
	s.CountVar(&l.MaxQueuedGrammars, "max-queued-grammars", l.MaxQueuedGrammars, 1, "constrained requests that may wait for the compilation of their grammar; further ones get 429")
	s.SizeVar(&l.GrammarCache, "grammar-outcome-memory", false, "memory of recent outcomes of compiling grammars in the gateway")
	s.CountVar(&l.MaxLogprobs, "max-logprobs", l.MaxLogprobs, 1, "most log-probabilities per token (top_logprobs) of a request; at most 256")
}

// register adds the flags. A server of one node has none of them.
func (f *plannerFlags) register(s *config.Set) {
	s.Section("Planner")
	f.ttft, f.itl = 2*time.Second, 50*time.Millisecond
	s.StringVar(&f.file, "planner-profile", "", "profile of the nodes, as for tandem sim: the gateway computes how many nodes the fleet should have (tandem:desired_nodes, /admin/desired), for an autoscaler; empty: it does not")
	s.SecondsVar(&f.ttft, "planner-ttft", false, "time to the first token within which the planner has waiting prompts computed")
	s.SecondsVar(&f.itl, "planner-itl", false, "time between two tokens that the planner plans decode nodes for")
	s.CountVar(&f.most, "planner-max-nodes", 64, 1, "most nodes of a role that the planner asks for")
}
