"""KnapFormer: balance variable-length sequences over ranks and attend to the split ones."""

from knapformer.layout import check_layout as check_layout
from knapformer.plan import RoutingPlan as RoutingPlan
from knapformer.planners.routes import plan_micro_steps as plan_micro_steps
from knapformer.planners.routes import plan_routes as plan_routes
from knapformer.workload import WorkloadModel as WorkloadModel
