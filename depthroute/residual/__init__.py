"""Ways of connecting sub-layers, each behind one protocol."""

from depthroute.residual.attnres import AttnRes as AttnRes
from depthroute.residual.attnres import AttnResConfig as AttnResConfig
from depthroute.residual.attnres import Bank as Bank
from depthroute.residual.norm import RMSNorm as RMSNorm
from depthroute.residual.norm import normalised as normalised
from depthroute.residual.prenorm import PreNorm as PreNorm
from depthroute.residual.prenorm import PreNormConfig as PreNormConfig
from depthroute.residual.protocol import METHODS as METHODS
from depthroute.residual.protocol import Body as Body
from depthroute.residual.protocol import Inputs as Inputs
from depthroute.residual.protocol import Memory as Memory
from depthroute.residual.protocol import Norm as Norm
from depthroute.residual.protocol import Residual as Residual
from depthroute.residual.protocol import ResidualConfig as ResidualConfig
from depthroute.residual.protocol import RoleInputs as RoleInputs
from depthroute.residual.registry import parse_residual as parse_residual
from depthroute.residual.schedule import block_ends as block_ends
