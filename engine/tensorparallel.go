package engine

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"time"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/backend/cuda"
	"github.com/tandem-serving/tandem/engine/model"
	"github.com/tandem-serving/tandem/engine/ranks"
)

// ErrLost says that a rank of the model is lost. The engine has stopped.
var ErrLost = backend.ErrLost

// DefaultRankTimeout is how long a rank may let the others wait: many times what the
// largest step takes, of which they meet several times in each layer.
const DefaultRankTimeout = 60 * time.Second

// TensorParallel has a model computed by several processes of this machine, a part
// of each matrix each. This one is rank 0, which schedules; the others load
// their own parts and run the steps that it hands out.
type TensorParallel struct {
	Ranks   int           // 0 or 1: none but this
	Timeout time.Duration // that ranks wait for each other; 0: DefaultRankTimeout

	Command []string              // program and arguments of a rank, which calls ServeRank
	Start   func(*exec.Cmd) error // starts it so that it does not outlive this process
}

func (t *TensorParallel) shard(rank int) model.Shard { return model.Shard{Rank: rank, Ranks: t.Ranks} }

// threads are those of each rank, of which this machine runs all.
func (t *TensorParallel) threads(all int) int {
	if t.Ranks <= 1 {
		return all
	}
	if all == 0 {
		all = runtime.GOMAXPROCS(0)
	}
	return max(1, all/t.Ranks)
}

// checkRanks names what ranks cannot have.
func (o *LoadOptions) checkRanks() error {
	t := &o.TensorParallel
	switch {
	case t.Ranks < 0 || t.Ranks > ranks.MaxRanks:
		return fmt.Errorf("%w: --tensor-parallel-size %d, want 1 to %d", ErrOption, t.Ranks, ranks.MaxRanks)
	case t.Timeout < 0:
		return fmt.Errorf("%w: --distributed-timeout-seconds %v, want more than 0", ErrOption, t.Timeout)
	case t.Ranks > 1 && o.Adapters.Places > 0:
		return fmt.Errorf("%w: --enable-lora with --tensor-parallel-size %d: adapters are for models that one process computes", ErrOption, t.Ranks)
	case t.Ranks > 1 && len(t.Command) == 0:
		return fmt.Errorf("%w: --tensor-parallel-size %d: this command starts no further processes", ErrOption, t.Ranks)
	}
	if t.Timeout == 0 {
		t.Timeout = DefaultRankTimeout
	}
	return nil
}

// rankSetup is what a rank loads.
type rankSetup struct {
	Model, Kernels, Quantization string
	Shard                        model.Shard
	Threads                      int
	Limits                       backend.Limits
	Context                      int // positions of the longest sequence
	FaultBatchOrder              bool
	SharedKV                     bool // KV lies in a file

	GPU                      bool
	Device                   int // number of the GPU
	CUDALibrary, NCCLLibrary string
	EnforceEager             bool
	Meet                     []byte // the name by which the GPUs find each other
}

// rankKV is where a rank's KV lies: in the file, at a place for each region, or
// in memory of its own if there are none.
type rankKV struct {
	Spec   backend.KVSpec
	Places []int64
	Seqs   int // graphs of steps of up to so many are recorded
}

// Ranks is how many processes compute the model.
func (l *Loaded) Ranks() int {
	if l.ranks == nil {
		return 1
	}
	return l.ranks.Ranks()
}

// startRanks starts the processes of the others, which load while this one does.
func (l *Loaded) startRanks(o *LoadOptions, device choice, limits backend.Limits) (backend.Ranks, error) {
	t := &o.TensorParallel
	if t.Ranks <= 1 {
		return nil, nil
	}
	if device.gpu {
		if o.SharedKV {
			return nil, fmt.Errorf("%w: --tensor-parallel-size %d on GPUs is of `tandem serve`: KV blocks of several GPUs do not travel between prefill and decode nodes", ErrOption, t.Ranks)
		}
		id, err := cuda.RanksID(o.CUDALibrary, o.NCCLLibrary)
		if err != nil {
			return nil, fmt.Errorf("%w: --tensor-parallel-size %d, --nccl-library %s: %w", ErrOption, t.Ranks, o.NCCLLibrary, err)
		}
		l.meet, l.Synchronous = id, true // the others' devices do not draw
	}
	if o.KVFile == nil && o.SharedKV {
		var err error
		if l.own, err = ranks.NewMemory("tandem-kv"); err != nil {
			return nil, err
		}
		o.KVFile = l.own
	}
	ro := ranks.Options{
		Ranks: t.Ranks, Mailbox: ranks.Mailbox(limits, len(l.KV.Groups)), Timeout: t.Timeout, Command: t.Command, Start: t.Start, Log: os.Stderr,
	}
	if o.KVFile != nil {
		ro.Files = []*os.File{o.KVFile.File()}
	}
	var err error
	if l.ranks, err = ranks.Start(ro); err != nil {
		return nil, err
	}
	err = l.ranks.Tell(func(rank int) any {
		return rankSetup{
			Model: o.Model, Kernels: o.Kernels, Quantization: o.Quantization, Shard: t.shard(rank), Threads: t.threads(o.Threads),
			Limits: limits, Context: l.Scheduler.MaxModelLen, FaultBatchOrder: o.FaultBatchOrder, SharedKV: o.KVFile != nil,
			GPU: device.gpu, Device: device.number + rank, CUDALibrary: o.CUDALibrary, NCCLLibrary: o.NCCLLibrary, EnforceEager: o.EnforceEager, Meet: l.meet,
		}
	})
	return l.ranks, err
}

// mapKV is where this process's KV lies. Where ranks have theirs in the same file,
// a region of each is mapped, since who transfers blocks transfers all of theirs.
func (l *Loaded) mapKV(o *LoadOptions) func(bytes int) ([]byte, error) {
	if o.KVFile == nil {
		return nil
	}
	if l.ranks == nil {
		return o.KVFile.Map
	}
	return func(bytes int) ([]byte, error) {
		first := len(l.shared)
		for range l.ranks.Ranks() {
			b, err := o.KVFile.Map(bytes)
			if err != nil {
				return nil, err
			}
			l.shared = append(l.shared, b)
		}
		return l.shared[first], nil
	}
}

// readyRanks waits until the others have loaded, and has them make their KV.
func (l *Loaded) readyRanks(o *LoadOptions) error {
	if l.ranks == nil {
		return nil
	}
	if err := l.ranks.Answers(); err != nil {
		return err
	}
	err := l.ranks.Tell(func(rank int) any {
		kv := rankKV{Spec: l.KV, Seqs: o.MaxSeqs}
		for i := rank; i < len(l.shared); i += l.ranks.Ranks() {
			at, _ := o.KVFile.Place(l.shared[i]) // it has just been mapped
			kv.Places = append(kv.Places, at)
		}
		return kv
	})
	if gpu, ok := l.Backend.(*cuda.CUDA); ok && err == nil { // all have loaded by now, and come
		err = gpu.Meet(o.NCCLLibrary, l.meet)
	}
	if err == nil {
		err = l.ranks.Answers()
	}
	return err
}

// ServeRank is a rank's whole life: it loads its part and runs steps until rank 0
// ends. Its process was started by TensorParallel's Command.
func ServeRank() error {
	m, err := ranks.Join()
	if err != nil {
		return err
	}
	var setup rankSetup
	if err := m.Hear(&setup); err != nil {
		return err
	}
	src, err := OpenModel(setup.Model)
	if err != nil {
		return m.Answer(err)
	}
	src.SetContext(setup.Context)
	r := &rank{Member: m}
	if r.model, err = r.load(src, &setup); err == nil {
		err = r.run()
	} else {
		err = m.Answer(err)
	}
	if r.device != nil {
		err = errors.Join(err, r.device.Close())
	}
	return errors.Join(err, src.Close())
}

// rank is one other than 0.
type rank struct {
	*ranks.Member
	device backend.Backend
	model  *model.Model
	kv     rankKV
	meet   func(*cuda.CUDA) error
}

// load puts this rank's part on its device.
func (r *rank) load(src *model.Source, s *rankSetup) (*model.Model, error) {
	q, err := quantization(s.Quantization)
	if err != nil {
		return nil, err
	}
	if s.GPU {
		r.meet = func(c *cuda.CUDA) error { return c.Meet(s.NCCLLibrary, s.Meet) }
		dev, err := cuda.New(cuda.Options{Library: s.CUDALibrary, Device: s.Device, Limits: s.Limits, Eager: s.EnforceEager, Ranks: r.Group})
		if err != nil {
			return nil, fmt.Errorf("cuda:%d: %w", s.Device, err)
		}
		r.device = dev
		return model.Load(src, r.device, s.Limits, model.Options{Quantization: q, Shard: s.Shard})
	}
	o := cpu.Options{Threads: s.Threads, Limits: s.Limits, Kernels: s.Kernels, Mapped: true, Ranks: r.Group, FaultBatchOrder: s.FaultBatchOrder}
	if s.SharedKV {
		o.MapKV = r.mapKV
	}
	dev, err := cpu.New(o)
	if err != nil {
		return nil, err
	}
	r.device = dev
	return model.Load(src, r.device, s.Limits, model.Options{Quantization: q, Shard: s.Shard})
}

// mapKV maps the next of this rank's regions.
func (r *rank) mapKV(bytes int) ([]byte, error) {
	if len(r.kv.Places) == 0 {
		return nil, fmt.Errorf("%w: no place for KV", ErrConfig)
	}
	at := r.kv.Places[0]
	r.kv.Places = r.kv.Places[1:]
	return ranks.Map(r.Files[0], at, bytes)
}

// run makes the KV store and then runs steps.
func (r *rank) run() error {
	if err := r.Answer(nil); err != nil {
		return err
	}
	if err := r.Hear(&r.kv); err != nil {
		return err
	}
	err := r.device.AllocKV(r.kv.Spec)
	if gpu, ok := r.device.(*cuda.CUDA); ok && err == nil {
		err = r.meet(gpu)
	}
	if err := r.Answer(err); err != nil {
		return err
	}
	r.Watch()
	// As rank 0 does at the same time: what they meet by may be connected only then.
	if _, err := r.model.Capture(r.kv.Seqs, nil); err != nil {
		r.Lose(r.Rank(), err.Error())
		return err
	}
	var step backend.Step
	for {
		if err := r.Next(&step); errors.Is(err, ranks.ErrClosed) {
			return nil
		} else if err != nil {
			return err
		}
		if err := r.model.Step(&step, nil); err != nil {
			r.Lose(r.Rank(), err.Error())
			return err
		}
	}
}
