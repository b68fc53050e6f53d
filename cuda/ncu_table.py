"""Print the kernels of a CSV file of Nsight Compute as a Markdown table, the longest time first:

    python3 ncu_table.py FILE.csv
"""

import collections
import csv
import sys

TIMES = {"ns": 1e-3, "nsecond": 1e-3, "us": 1, "usecond": 1, "ms": 1e3, "msecond": 1e3}
BYTES = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}

lines = [line for line in csv.reader(open(sys.argv[1])) if len(line) > 5]
start = next((i for i, line in enumerate(lines) if "Kernel Name" in line), None)
if start is None:
    sys.exit("the file has no kernels")
head, units = lines[start], lines[start + 1]
name, time, read = (head.index(c) for c in ("Kernel Name", "gpu__time_duration.sum", "dram__bytes_read.sum"))
grid = next((i for i, c in enumerate(head) if c in ("Grid Size", "launch__grid_size")), None)
totals = collections.defaultdict(lambda: [0, 0.0, 0.0])
for line in lines[start + 2 :]:
    total = totals[line[name].split("(")[0][:40], line[grid] if grid is not None else ""]
    total[0] += 1
    total[1] += float(line[time].replace(",", "")) * TIMES[units[time]]
    total[2] += float(line[read].replace(",", "")) * BYTES[units[read]]
print("\n| kernel | grid | launches | us a launch | GB/s | us in all |\n|---|---|---|---|---|---|")
for (kernel, blocks), (n, us, got) in sorted(totals.items(), key=lambda x: -x[1][1]):
    print(f"| {kernel} | {blocks} | {n} | {us / n:.2f} | {got / us / 1e3 if us else 0:.0f} | {us:.0f} |")
