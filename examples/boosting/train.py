"""One fold of gradient boosting on tabular data, with scikit-learn and without PyTorch: python train.py --fold 1"""

import argparse

import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.metrics import r2_score, root_mean_squared_error
from sklearn.model_selection import KFold

parser = argparse.ArgumentParser()
parser.add_argument("--fold", type=int, required=True)
parser.add_argument("--rows", type=int, default=20_000)
options = parser.parse_args()

rng = np.random.default_rng(0)
features = rng.normal(size=(options.rows, 20))
target = features[:, 0] * features[:, 1] + np.sin(features[:, 2]) + rng.normal(scale=0.3, size=options.rows)
train, test = list(KFold(5, shuffle=True, random_state=0).split(features))[options.fold - 1]

model = HistGradientBoostingRegressor(max_iter=100, random_state=0).fit(features[train], target[train])
predicted = model.predict(features[test])
rmse, r2 = root_mean_squared_error(target[test], predicted), r2_score(target[test], predicted)
print(f"fold {options.fold} rmse {rmse:.4f} r2 {r2:.4f}")
