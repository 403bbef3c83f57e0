"""KnapFormer: balance variable-length sequences over ranks and attend to the split ones."""

from knapformer.attention import DomainGroup as DomainGroup
from knapformer.attention import bind_attention as bind_attention
from knapformer.attention import make_domain_group as make_domain_group
from knapformer.balancer import Balancer as Balancer
from knapformer.balancer import PendingPlan as PendingPlan
from knapformer.balancer import gather_lengths as gather_lengths
from knapformer.exchange import restore as restore
from knapformer.exchange import restore_parts as restore_parts
from knapformer.exchange import restore_rows as restore_rows
from knapformer.exchange import route as route
from knapformer.exchange import route_parts as route_parts
from knapformer.exchange import route_rows as route_rows
from knapformer.kernels import Packing as Packing
from knapformer.kernels import VarlenKernel as VarlenKernel
from knapformer.kernels import choose_kernel as choose_kernel
from knapformer.layout import check_layout as check_layout
from knapformer.plan import RoutingPlan as RoutingPlan
from knapformer.planners.routes import own_sequences as own_sequences
from knapformer.planners.routes import plan_micro_steps as plan_micro_steps
from knapformer.planners.routes import plan_routes as plan_routes
from knapformer.workload import WorkloadModel as WorkloadModel
