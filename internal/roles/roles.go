// Package roles runs the subcommands that are a part of a cluster: it declares flags into each
// package's options, starts the parts in order and stops them in reverse. It is the only
// package that imports every role.
package roles

import (
	"io"
	"slices"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/internal/cli"
)

// version is the build that the process reports, set by Main.
var version string

// table returns the subcommands in the order of help.
func table() cli.Table {
	tools := cli.Tools()
	last := len(tools) - 1 // version
	tools = slices.Insert(tools, last, cli.New("sim", "[flags]", "Simulates a fleet in virtual time: a trace or a load on the real router and scheduler, with the step times of a profile.",
		`tandem sim --fleet 6P2D --profile h200:llama-8b --load "rps=20,in=lognormal(8,0.9),out=343,prefix=0.3"`, runSim),
		cli.New("plan pools", "--profile PROFILE --trace FILE|--load SPEC [flags]",
			"Chooses the numbers of prefill and decode nodes for a load: simulates fleets, prints the cheapest one that meets the objectives, its neighbours, the load at which it fails, and its cost.",
			`tandem plan pools --profile h100:llama-8b --load "rps=10,in=lognormal(8,0.9),out=343,prefix=0.3" --ttft p90=2s --tpot p90=50ms`, runPlanPools),
		cli.New("advise", "--profile PROFILE [flags]",
			"Advises about a fleet that runs: records its load, compares the prediction of the simulator with what the gateway measured, and prints what a cheaper fleet saves, what to change first, and what the fleet risks.",
			"tandem advise --url http://127.0.0.1:8000 --profile node.yaml --for 10m --price-per-hour 3.80", runAdvise))
	return append(cli.Table{
		cli.New("up", "[flags]", "Starts a cluster on this machine: a gateway, prefill nodes and decode nodes, each a process.",
			"tandem up --prefill 1 --decode 2 --model ./Llama-3.2-1B-Instruct", runUp),
		cli.New("gateway", "[flags]", "Runs a gateway: the OpenAI API in front of the fleet.",
			"tandem gateway --tls-dir certs/gw1 --host 0.0.0.0 --advertise 10.0.0.1 --ssl-certfile gw.crt --ssl-keyfile gw.key", runGateway),
		cli.New("prefill", "[flags]", "Runs a prefill node: computes prompts' KV and pushes it to decode nodes.",
			"tandem prefill --tls-dir certs/p1 --join 10.0.0.1:7946 --host 10.0.0.2 --model ./Llama-3.2-1B-Instruct", runPrefill),
		cli.New("decode", "[flags]", "Runs a decode node: owns requests and streams their tokens.",
			"tandem decode --tls-dir certs/d1 --join 10.0.0.1:7946 --host 10.0.0.3 --model ./Llama-3.2-1B-Instruct", runDecode),
		cli.New("serve", "[MODEL] [flags]", "Serves a model with all roles in this one process.",
			"tandem serve ./Llama-3.2-1B-Instruct --port 8000", runServe),
		cli.New("run-batch", "-i IN -o OUT [flags]", "Answers the requests of a file, by a model in this process or a gateway, and continues after a kill where it ended.",
			"tandem run-batch -i requests.jsonl -o answers.jsonl --model ./Llama-3.2-1B-Instruct", runBatch),
	}, tools...)
}

// changeEngine, if not nil, changes the options of the process's engine. Only MainWith sets it.
var changeEngine func(*engine.Options)

// MainWith is Main with engines whose options change sets. It is for programs that prove something
// of the roles, such as bench/sim/proof. The program tandem calls Main, which has no such engines.
func MainWith(change func(*engine.Options), release string, args, environ []string, out, errOut io.Writer) int {
	changeEngine = change
	return Main(release, args, environ, out, errOut)
}

// Main runs the program with the arguments after its name and returns the exit status.
// release is its version without build metadata.
func Main(release string, args, environ []string, out, errOut io.Writer) int {
	if len(args) == 2 && args[0] == cli.RankCommand {
		return rank(args[1])
	}
	version = cli.Build(release)
	return table().Main(version, args, environ, out, errOut)
}
