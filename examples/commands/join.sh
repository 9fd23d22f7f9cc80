# Write the mean error of all folds: join.sh OUTPUT_FOLDER FOLD_FOLDER...
out=$1
shift
for fold in "$@"; do cat "$fold/result.json"; echo; done |
  awk -F '[:,]' '{ sum += $2 } END { printf "{\"error\": %.6f}\n", sum / NR }' > "$out/result.json"
