package truth

import (
	"os"
	"runtime"
	"testing"
	"time"
)

// This process has used CPU, and one that never was has not.
func TestTreeCPU(t *testing.T) {
	if runtime.GOOS != "linux" {
		return
	}
	for began := time.Now(); ; { // hundredths of a second are all that is told
		if used, alive := treeCPU(os.Getpid()); !alive {
			t.Fatal("this process is not there")
		} else if used > 0 {
			break
		}
		if time.Since(began) > time.Minute {
			t.Fatal("this process used nothing in a minute")
		}
	}
	if used, alive := treeCPU(1 << 30); used != 0 || alive {
		t.Errorf("a process that is not there used %v", used)
	}
}
