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
	"github.com/tandem-serving/tandem/engine/workers"
)

// ErrLost means that a tensor-parallel worker is lost. The engine has stopped.
var ErrLost = backend.ErrLost

// ErrDevice means that the device has failed for good. The engine has stopped.
var ErrDevice = backend.ErrDevice

// DefaultWorkerTimeout bounds how long a worker may keep the others waiting. It is many
// times the duration of the largest step, and workers meet several times in each layer.
const DefaultWorkerTimeout = 60 * time.Second

// TensorParallel configures several processes of this machine, the tensor-parallel
// workers, to compute a model together, each with a part of each matrix. This process
// is rank 0, which schedules. The others load their parts and run the steps that
// rank 0 hands out.
type TensorParallel struct {
	Size    int           // 0 or 1: this process alone
	Timeout time.Duration // bound of a wait for another worker; 0: DefaultWorkerTimeout

	Command []string              // program and arguments of a worker, which calls ServeWorker
	Start   func(*exec.Cmd) error // starts a worker so that it does not outlive this process
}

func (t *TensorParallel) shard(rank int) model.Shard { return model.Shard{Rank: rank, Ranks: t.Size} }

// threads returns the threads of each worker. All workers run on this machine.
func (t *TensorParallel) threads(all int) int {
	if t.Size <= 1 {
		return all
	}
	if all == 0 {
		all = runtime.GOMAXPROCS(0)
	}
	return max(1, all/t.Size)
}

// checkTensorParallel returns an error for options that tensor parallelism cannot have.
func (o *LoadOptions) checkTensorParallel() error {
	t := &o.TensorParallel
	switch {
	case t.Size < 0 || t.Size > workers.MaxWorkers:
		return fmt.Errorf("%w: --tensor-parallel-size %d, want 1 to %d", ErrOption, t.Size, workers.MaxWorkers)
	case t.Timeout < 0:
		return fmt.Errorf("%w: --distributed-timeout-seconds %v, want more than 0", ErrOption, t.Timeout)
	case t.Size > 1 && o.Adapters.Places > 0:
		return fmt.Errorf("%w: --enable-lora with --tensor-parallel-size %d: adapters need a model that one process computes", ErrOption, t.Size)
	case t.Size > 1 && len(t.Command) == 0:
		return fmt.Errorf("%w: --tensor-parallel-size %d: this command cannot start worker processes", ErrOption, t.Size)
	}
	if t.Timeout == 0 {
		t.Timeout = DefaultWorkerTimeout
	}
	return nil
}

// workerSetup is the first message to a worker: what to load.
type workerSetup struct {
	Model, Kernels, Quantization string
	DType                        string // see LoadOptions
	Shard                        model.Shard
	Threads                      int
	Limits                       backend.Limits
	Context                      int // positions of the longest sequence
	FaultBatchOrder              bool
	SharedKV                     bool // KV is stored in a shared file

	GPU                      bool
	Device                   int // number of the GPU
	CUDALibrary, NCCLLibrary string
	EnforceEager             bool
	Meet                     []byte // the id by which the GPUs join one communicator
}

// workerKV is the second message to a worker: where its KV is stored. With Places it is
// in the shared file, at an offset for each region, else in the worker's own memory.
type workerKV struct {
	Spec   backend.KVSpec
	Places []int64
	Seqs   int // graphs of steps of up to so many sequences are recorded
}

// Workers returns the number of processes that compute the model.
func (l *Loaded) Workers() int {
	if l.workers == nil {
		return 1
	}
	return l.workers.Size()
}

// startWorkers starts the other workers, which load while this process does.
func (l *Loaded) startWorkers(o *LoadOptions, device choice, limits backend.Limits) (backend.WorkerGroup, error) {
	t := &o.TensorParallel
	if t.Size <= 1 {
		return nil, nil
	}
	if device.gpu {
		if o.SharedKV {
			return nil, fmt.Errorf("%w: --tensor-parallel-size %d on GPUs needs `tandem serve`: KV blocks of several GPUs cannot be transferred between prefill and decode nodes", ErrOption, t.Size)
		}
		id, err := cuda.NewGroupID(o.CUDALibrary, o.NCCLLibrary)
		if err != nil {
			return nil, fmt.Errorf("%w: --tensor-parallel-size %d, --nccl-library %s: %w", ErrOption, t.Size, o.NCCLLibrary, err)
		}
		l.groupID, l.Synchronous = id, true // the others' devices do not draw
	}
	if o.KVFile == nil && o.SharedKV {
		var err error
		if l.own, err = workers.NewMemory("tandem-kv"); err != nil {
			return nil, err
		}
		o.KVFile = l.own
	}
	ro := workers.Options{
		Size: t.Size, Mailbox: workers.Mailbox(limits, len(l.KV.Groups)), Timeout: t.Timeout, Command: t.Command, Start: t.Start, Log: os.Stderr,
	}
	if o.KVFile != nil {
		ro.Files = []*os.File{o.KVFile.File()}
	}
	var err error
	if l.workers, err = workers.Start(ro); err != nil {
		return nil, err
	}
	err = l.workers.Send(func(rank int) any {
		return workerSetup{
			Model: o.Model, Kernels: o.Kernels, Quantization: o.Quantization, DType: o.DType, Shard: t.shard(rank), Threads: t.threads(o.Threads),
			Limits: limits, Context: l.Scheduler.MaxModelLen, FaultBatchOrder: o.FaultBatchOrder, SharedKV: o.KVFile != nil,
			GPU: device.gpu, Device: device.number + rank, CUDALibrary: o.CUDALibrary, NCCLLibrary: o.NCCLLibrary, EnforceEager: o.EnforceEager, Meet: l.groupID,
		}
	})
	return l.workers, err
}

// mapKV returns the allocator of this process's KV. If the workers' KV is in the same
// file, it maps a region of each, because a transfer of a block moves the parts of all.
func (l *Loaded) mapKV(o *LoadOptions) func(bytes int) ([]byte, error) {
	if o.KVFile == nil {
		return nil
	}
	if l.workers == nil {
		return o.KVFile.Map
	}
	return func(bytes int) ([]byte, error) {
		first := len(l.shared)
		for range l.workers.Size() {
			b, err := o.KVFile.Map(bytes)
			if err != nil {
				return nil, err
			}
			l.shared = append(l.shared, b)
		}
		return l.shared[first], nil
	}
}

// readyWorkers waits until the other workers have loaded, and makes them allocate their KV.
func (l *Loaded) readyWorkers(o *LoadOptions) error {
	if l.workers == nil {
		return nil
	}
	if err := l.workers.AwaitReplies(); err != nil {
		return err
	}
	err := l.workers.Send(func(rank int) any {
		kv := workerKV{Spec: l.KV, Seqs: o.MaxSeqs}
		for i := rank; i < len(l.shared); i += l.workers.Size() {
			at, _ := o.KVFile.Place(l.shared[i]) // it has just been mapped
			kv.Places = append(kv.Places, at)
		}
		return kv
	})
	if gpu, ok := l.Backend.(*cuda.CUDA); ok && err == nil { // all have loaded by now, and come
		err = gpu.JoinGroup(o.NCCLLibrary, l.groupID)
	}
	if err == nil {
		err = l.workers.AwaitReplies()
	}
	return err
}

// ServeWorker is the main function of a worker: it loads its part and runs steps until
// rank 0 ends. TensorParallel's Command has started its process.
func ServeWorker() error {
	m, err := workers.Join()
	if err != nil {
		return err
	}
	var setup workerSetup
	if err := m.Receive(&setup); err != nil {
		return err
	}
	src, err := OpenModel(setup.Model)
	if err != nil {
		return m.Reply(err)
	}
	src.SetContext(setup.Context)
	(&choice{gpu: setup.GPU}).widen(src, setup.DType)
	r := &worker{Worker: m, source: src}
	if r.model, err = r.load(src, &setup); err == nil {
		err = r.run()
	} else {
		err = m.Reply(err)
	}
	if r.device != nil {
		err = errors.Join(err, r.device.Close())
	}
	return errors.Join(err, src.Close())
}

// worker is a worker other than rank 0.
type worker struct {
	*workers.Worker
	device    backend.Backend
	source    *model.Source
	model     *model.Model
	kv        workerKV
	joinGroup func(*cuda.CUDA) error
}

// load loads this worker's part onto its device.
func (r *worker) load(src *model.Source, s *workerSetup) (*model.Model, error) {
	q, err := quantization(s.Quantization)
	if err != nil {
		return nil, err
	}
	if s.GPU {
		r.joinGroup = func(c *cuda.CUDA) error { return c.JoinGroup(s.NCCLLibrary, s.Meet) }
		dev, err := cuda.New(cuda.Options{Library: s.CUDALibrary, Device: s.Device, Limits: s.Limits, Eager: s.EnforceEager, Group: r.Group})
		if err != nil {
			return nil, fmt.Errorf("cuda:%d: %w", s.Device, err)
		}
		r.device = dev
		return model.Load(src, r.device, s.Limits, model.Options{Quantization: q, Shard: s.Shard})
	}
	o := cpu.Options{Threads: s.Threads, Limits: s.Limits, Kernels: s.Kernels, Mapped: true, Group: r.Group, FaultBatchOrder: s.FaultBatchOrder}
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

// mapKV maps the next of this worker's regions.
func (r *worker) mapKV(bytes int) ([]byte, error) {
	if len(r.kv.Places) == 0 {
		return nil, fmt.Errorf("%w: no place for KV", ErrConfig)
	}
	at := r.kv.Places[0]
	r.kv.Places = r.kv.Places[1:]
	return workers.Map(r.Files[0], at, bytes)
}

// run allocates the KV store and then runs steps.
func (r *worker) run() error {
	if err := r.Reply(nil); err != nil {
		return err
	}
	if err := r.Receive(&r.kv); err != nil {
		return err
	}
	err := r.device.AllocKV(r.kv.Spec)
	if err == nil && r.kv.Spec.DType == backend.FP8 {
		err = r.model.ScaleKV(r.source)
	}
	if gpu, ok := r.device.(*cuda.CUDA); ok && err == nil {
		err = r.joinGroup(gpu)
	}
	if err := r.Reply(err); err != nil {
		return err
	}
	r.Watch()
	// Rank 0 captures at the same time: communicators may connect only then.
	if _, err := r.model.Capture(r.kv.Seqs, nil); err != nil {
		r.MarkLost(r.Rank(), err.Error())
		return err
	}
	var step backend.Step
	for {
		if err := r.Next(&step); errors.Is(err, workers.ErrClosed) {
			return nil
		} else if err != nil {
			return err
		}
		if err := r.model.Step(&step, nil); err != nil {
			r.MarkLost(r.Rank(), err.Error())
			return err
		}
	}
}
