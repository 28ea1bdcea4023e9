//! Who we are to the control plane.

use prost_types::value::Kind;
use prost_types::{Struct, Value};

use crate::grpc::core::Node;

/// Who we are to the control plane, as a pod knows it (contract 2.5 and 3.1).
#[derive(Clone, Debug)]
pub struct Pod {
    /// The pod's name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Its address.
    pub ip: String,
    /// Its service account.
    pub service_account: String,
    /// The cluster that it runs in.
    pub cluster: String,
    /// The network that its endpoints are in.
    pub network: String,
    /// The Gateway that it is of, by its label; empty if that is not known.
    pub gateway: String,
    /// The version of Istio whose dialect we speak.
    pub istio_version: String,
}

impl Pod {
    /// The node of the first requests: an `istio-east-west` gateway, to istiod a waypoint with the
    /// label of the controller that manages it (contract 2.5).
    pub(super) fn node(&self) -> Node {
        let Self {
            name,
            namespace,
            ip,
            ..
        } = self;
        let labels = [
            ("gateway.istio.io/managed", "istio.io-eastwest-controller"),
            ("topology.istio.io/network", &*self.network),
        ];
        let gateway = ("gateway.networking.k8s.io/gateway-name", &*self.gateway);
        let labels = labels.into_iter().chain([gateway]);
        let labels = labels.filter(|(_, value)| !value.is_empty());
        let labels = labels.map(|(key, value)| (key.to_owned(), text(value)));
        let fields = [
            ("NAME", text(name)),
            ("NAMESPACE", text(namespace)),
            ("SERVICE_ACCOUNT", text(&self.service_account)),
            ("CLUSTER_ID", text(&self.cluster)),
            ("NETWORK", text(&self.network)),
            ("REQUESTED_NETWORK_VIEW", text(&self.network)),
            ("INSTANCE_IPS", text(ip)),
            ("ISTIO_VERSION", text(&self.istio_version)),
            ("LABELS", value(Kind::StructValue(fields_of(labels)))),
        ];
        Node {
            id: format!("waypoint~{ip}~{name}.{namespace}~{namespace}.svc.cluster.local"),
            metadata: Some(fields_of(
                fields.map(|(key, value)| (key.to_owned(), value)),
            )),
            user_agent_name: "strait".to_owned(),
            user_agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            ..Node::default()
        }
    }
}

fn fields_of(fields: impl IntoIterator<Item = (String, Value)>) -> Struct {
    Struct {
        fields: fields.into_iter().collect(),
    }
}

fn text(text: &str) -> Value {
    value(Kind::StringValue(text.to_owned()))
}

fn value(kind: Kind) -> Value {
    Value { kind: Some(kind) }
}
