package roles

import (
	"time"

	"github.com/tandem-serving/tandem/gateway"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/limits"
	"github.com/tandem-serving/tandem/internal/process"
	"github.com/tandem-serving/tandem/internal/tlsconf"
	"github.com/tandem-serving/tandem/kvtransfer"
	"github.com/tandem-serving/tandem/kvtransfer/fabric"
)

// Flags that several commands share are declared once, here, into the options of the packages that
// take them. What no package takes as it is has a field beside the options.

// processFlags are those of every long-running command.
type processFlags struct {
	process.Options
	quietStats      bool
	traces          string // URL of a collector
	shutdownTimeout time.Duration
}

func (p *processFlags) register(s *config.Set) {
	s.StringVar(&p.LogLevel, "log-level", "info", "debug, info, warning or error")
	s.StringVar(&p.LogFormat, "log-format", "text", "text, lines in vLLM's manner, or json")
	s.BoolVar(&p.quietStats, "disable-log-stats", false, "leave out the lines of rates")
	s.StringVar(&p.traces, "otlp-traces-endpoint", "", "collector that gets traces, as OTLP over HTTP, such as http://127.0.0.1:4318; default: what OTEL_EXPORTER_OTLP_ENDPOINT says")
	p.shutdownTimeout = 30 * time.Second
	s.SecondsVar(&p.shutdownTimeout, "shutdown-timeout", false, "how long SIGTERM lets running requests finish")
}

// clusterFlags say how a process finds the others and proves that it belongs.
type clusterFlags struct {
	advertise  config.Address
	join       []string
	gossipPort int
	natsURL    string
}

func (c *clusterFlags) register(s *config.Set, p *process.Options, gossipPort int) {
	s.StringVar(&p.Name, "node-name", "", "name in logs and status; default: role and a random suffix")
	s.StringVar(&p.TLSDir, "tls-dir", "", "folder with the cluster's certificates (see tandem ca)")
	s.Var(&c.advertise, "advertise", "address that other nodes reach this one at; default: --host, or this machine's own")
	s.StringSliceVar(&c.join, "join", nil, "host:port of any members' gossip, or a DNS name with all of them")
	s.PortVar(&c.gossipPort, "gossip-port", gossipPort, "port of gossip, TCP and UDP; 0: any")
	s.StringVar(&c.natsURL, "nats-url", "", "NATS server to use instead of the gateways' own")
}

// nodeFlags say what prefill and decode nodes listen on, and how KV blocks travel.
type nodeFlags struct {
	host                      string
	rpcPort, kvPort, httpPort int
	tls                       bool
	transport                 string
	fabric                    fabric.Options
	writer                    kvtransfer.WriterOptions
}

func (n *nodeFlags) register(s *config.Set, rpc, kv, http int) {
	s.StringVar(&n.host, "host", "127.0.0.1", "address to listen on")
	s.PortVar(&n.rpcPort, "rpc-port", rpc, "port for requests from other nodes; 0: any")
	s.PortVar(&n.kvPort, "kv-port", kv, "port for KV blocks; 0: any (decode nodes)")
	s.PortVar(&n.httpPort, "http-port", http, "port of /metrics, /livez and /readyz; 0: any")
	s.StringVar(&n.transport, "kv-transport", "auto", "how KV blocks travel: tcp; shm, between processes of one host, of which the decode node copies out of the prefill node's memory; rdma, by libfabric and in the clear, between nodes that both have it, else tcp; auto: shm where both ends can, else tcp")
	s.StringVar(&n.fabric.Provider, "fabric-provider", "auto", "libfabric's provider for --kv-transport rdma, the same on all nodes: verbs, efa, tcp, shm (between processes of one host); auto: verbs or efa, whichever there is")
	s.StringVar(&n.fabric.Address, "fabric-address", "", "address or host name of the interface for --kv-transport rdma, which other nodes reach; empty: --host, unless that is all interfaces")
	s.StringVar(&n.fabric.Library, "fabric-library", "libfabric.so.1", "libfabric for --kv-transport rdma, where the system's loader does not find the one that is meant, as EFA's under /opt/amazon/efa/lib")
	s.IntVar(&n.writer.Connections, "kv-connections", 2, "connections for KV blocks to each decode node, beside one for control; 1 to 16 (prefill nodes)")
	s.StringVar(&n.writer.CongestionControl, "kv-congestion-control", "", "TCP's congestion control for KV blocks, as the kernel names it, such as bbr where a far link loses packets; empty: the kernel's default (prefill nodes)")
	s.BoolVar(&n.tls, "kv-tls", false, "encrypt KV blocks on their way; the same on all nodes")
}

// upstreamFlags are the servers of another kind behind a gateway.
type upstreamFlags struct {
	gateway.Upstreams
	urls, prefill, decode []string
	protocol              string
	kubernetesAPI         string
	bootstrapPort         int
	caFile                string
	tokenizers            []string // FOLDER or MODEL=FOLDER
}

func (u *upstreamFlags) register(s *config.Set, l *limits.Limits) {
	s.StringSliceVar(&u.urls, "upstream", nil, "OpenAI-compatible server (vLLM, SGLang, ...) to put the gateway in front of: http(s)://HOST:PORT; dns:HOST:PORT, srv:NAME or k8s:NAMESPACE/SERVICE:PORT for several (dns+https:… with TLS); without --tls-dir there is no cluster of nodes beside them")
	s.StringSliceVar(&u.prefill, "upstream-prefill", nil, "the same, of servers that compute prompts for those of --upstream-decode")
	s.StringSliceVar(&u.decode, "upstream-decode", nil, "the same, of servers that answer from prompts computed by those of --upstream-prefill")
	s.StringVar(&u.protocol, "upstream-protocol", "vllm", "how the two are joined: vllm (kv_transfer_params) or sglang (bootstrap rooms)")
	s.PortVar(&u.bootstrapPort, "upstream-bootstrap-port", 0, "bootstrap port of SGLang's prefill servers; 0: they are asked")
	s.StringVar(&u.kubernetesAPI, "kubernetes-api", "", "URL of the API that k8s: asks, such as kubectl proxy's http://127.0.0.1:8001; default: that of the pod's cluster")
	s.StringVar(&u.APIKey, "upstream-api-key", "", "bearer token for them")
	s.Secret("upstream-api-key")
	s.StringVar(&u.caFile, "upstream-ca-file", "", "authorities of their certificates, PEM; default: the system's")
	s.StringVar(&u.HealthPath, "upstream-health-path", "/health", "path that says whether one is well; below 500 is")
	s.CountVar(&l.UpstreamRequests, "upstream-max-requests", 0, 0, "choices that a model's upstreams are given at once, each so many; further requests wait in the gateway as they do for nodes (--max-queued-requests, --queue-timeout); 0: any number")
	s.StringSliceVar(&u.tokenizers, "tokenizer", nil, "folder with the tokenizer.json and the chat template of upstreams' models, such as a checkpoint's: prompts are routed by blocks of their tokens, as they are to nodes, instead of by their first bytes; MODEL=FOLDER for one of several models; a prompt that it cannot turn into tokens goes by its bytes")
	s.BoolVar(&u.ForwardAuthorization, "upstream-forward-authorization", false, "send clients' Authorization and X-Api-Key on to them")
}

// any says whether there are upstreams.
func (u *upstreamFlags) any() bool { return len(u.urls)+len(u.prefill)+len(u.decode) > 0 }

// gatewayFlags are those of the client side.
type gatewayFlags struct {
	gateway.Options
	clients     tlsconf.ClientFiles
	certReqs    int
	insecure    bool
	adminListen string
}

func (g *gatewayFlags) register(s *config.Set, minRemotePrefill int) {
	s.ForGateways()
	g.Limits, g.StallTimeout, g.NodeSilence = limits.Default(), limits.StallTimeout, limits.NodeSilence
	l := &g.Limits
	s.StringVar(&g.Host, "host", limits.Host, "address to listen on for clients")
	s.PortVar(&g.Port, "port", limits.Port, "port to listen on for clients")
	s.StringVar(&g.clients.Cert, "ssl-certfile", "", "certificate for clients, PEM")
	s.StringVar(&g.clients.Key, "ssl-keyfile", "", "its key, PEM")
	s.StringVar(&g.clients.CA, "ssl-ca-certs", "", "authorities of clients' certificates, PEM; with --ssl-cert-reqs")
	s.CountVar(&g.certReqs, "ssl-cert-reqs", 0, 0, "certificates of clients: 0 none, 1 checked if they have one, 2 required")
	s.BoolVar(&g.insecure, "insecure", false, "serve clients beyond loopback without certificates")
	s.Var((*config.Origins)(&g.AllowedOrigins), "allowed-origins", `origins of web pages that may use the API from a browser, as in ["https://app.example"]; "*": any, on gateways with API keys; default: the gateway's own`)
	s.StringSliceVar(&g.AllowedHosts, "allowed-hosts", nil, "names by which clients may reach a gateway without API keys, or anyone --admin-listen, beside IP addresses, localhost, --host and the host of --admin-listen; *: any. Others get 403, so that no web page can pose as the gateway by DNS")
	s.ChoiceVar(&g.RejectSpecialTokens, "special-tokens-in-content", "allow", "reject", "text such as <|im_end|> in chat messages of users and tools: allow makes it the model's control token, as Hugging Face tokenizers do; reject answers 400. For models of nodes; upstreams decide for themselves")
	s.StringVar(&g.adminListen, "admin-listen", "", "host:port that serves metrics and the log level instead of --port")
	s.BoolVar(&g.LogRequests, "enable-log-requests", false, "log a line for each request, without its text")
	s.CountVar(&g.LogPromptText, "max-log-len", 0, 0, "characters of the prompt in that line; 0: none")
	s.StringSliceVar(&g.APIKeys, "api-key", nil, "bearer tokens that clients must present, any of them")
	s.Secret("api-key")
	s.StringVar(&g.APIKeyFile, "api-key-file", "", "file with a key a line, KEY or sha256:HEX, then name=N concurrency=N tokens-per-second=N weight=N priority=N admin=yes as wanted; read again when it changes")
	s.CountVar(&l.MaxQueuedRequests, "max-queued-requests", l.MaxQueuedRequests, 1, "requests that may wait in the gateway while the fleet has no room; beyond, they get 429")
	s.CountVar(&l.MaxQueuedTokens, "max-queued-tokens", l.MaxQueuedTokens, 1, "tokens that the prompts of those may have; beyond, requests get 429")
	s.SecondsVar(&l.QueueTimeout, "queue-timeout", false, "how long a request waits there, at most what it gives itself in the header X-Tandem-Timeout; one that would wait longer is refused at once")
	s.CountVar(&l.NodeBacklog, "node-backlog-requests", l.NodeBacklog, 1, "requests that wait on a decode node beside those that it runs; the others wait in the gateway")
	s.SecondsVar(&l.NodeBacklogTime, "node-backlog-time", true, "prompts that wait on nodes, in time to compute them; the others wait in the gateway")
	s.CountVar(&g.MinRemotePrefillTokens, "min-remote-prefill-tokens", minRemotePrefill, 0, "prompts with fewer tokens to compute are prefilled on the decode node")
	s.SecondsVar(&l.RequestTimeout, "request-timeout", false, "longest life of a request")
	s.StringVar(&g.Policy, "policy", "prefix", "how nodes are chosen: prefix, consistent_hash, least_load, power_of_two, round_robin or session; the header X-Tandem-Policy overrides it")
	s.SecondsVar(&l.ResumeTimeout, "resume-timeout", true, "how long a stream whose decode node died waits for another")
	s.SecondsVar(&g.StallTimeout, "stall-timeout", true, "a decode node that has work and makes no step for so long loses it to others; 0: never")
	s.SecondsVar(&g.NodeSilence, "node-silence", true, "a decode node whose heartbeats are missing for so long loses its streams to others, at most half of the nodes within 10s; at least 1s; 0: never")
	s.CountVar(&l.MaxAttempts, "max-attempts", l.MaxAttempts, 1, "nodes that take a request in a row without a token from any")
	s.SizeVar(&l.MaxBodyBytes, "max-request-body", false, "largest request body")
	s.SizeVar(&l.MaxBodyMemory, "max-body-memory", true, "memory of all large request bodies and of parsing them, arriving or being answered; beyond, requests get 429; 0: no bound")
	s.SecondsVar(&l.HeaderTimeout, "header-timeout", false, "how long a request's head may take to arrive")
	s.SizeVar(&l.MinBodyRate, "min-body-rate", true, "bytes of a request that must arrive a second, on average from its start, once --header-timeout is over; 0: any")
	s.CountVar(&l.MaxN, "max-n", l.MaxN, 1, "choices (n) that a request may ask for; at most 128")
	s.CountVar(&l.MaxPromptTokens, "max-prompt-tokens", l.MaxPromptTokens, 0, "tokens that a prompt may have; 0: what the model takes")
	s.CountVar(&l.MaxInFlight, "max-requests", l.MaxInFlight, 1, "requests that are answered at once, waiting ones included; beyond, they get 503")
	s.CountVar(&g.MaxConns, "max-connections", limits.MaxConns, 1, "connections of clients; for one more, the connection longest without a request is closed; at most what the limit on file descriptors leaves")
	s.CountVar(&l.MaxConnsPerAddress, "max-connections-per-address", l.MaxConnsPerAddress, 0, "connections of one client address (of IPv6 its first 64 bits); beyond, they get 429; 0: no bound, as behind a proxy")
	s.SecondsVar(&l.SlowClientTimeout, "slow-client-timeout", false, "how long a client may take nothing of its answer before it is given up")
	s.CountVar(&g.StreamTokens, "stream-buffer-tokens", limits.StreamTokens, 1, "tokens of a choice that may wait for a slow client before its generation pauses")
	s.RateVar(&l.RetriesPerSecond, "retries-per-second", "attempts that failed before their first token and are tried elsewhere, of all requests together; bursts of ten seconds' worth")
	s.RateVar(&l.ResumesPerSecond, "resumes-per-second", "streams whose node was lost that look for another, of all together; the others follow in turn")
	s.CountVar(&l.MaxLogprobs, "max-logprobs", l.MaxLogprobs, 1, "best tokens whose log-probabilities a request may ask for with each token; at most 256")
}
