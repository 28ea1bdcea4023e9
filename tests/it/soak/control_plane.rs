//! Control plane of the first gateway, and its faults.

use std::time::Duration;

use prost::Message as _;
use strait::grpc::workload::{Address, PortList};
use strait::xds::store::ADDRESS;
use tokio::time::sleep;

use crate::hold::hold;
use crate::support::istiod::{Istiod, Serving};
use crate::support::wds::{SERVICE, bytes, changed, other_service, ports, service, workload};
use crate::support::{Gateway, Net, identities};

/// Services that nothing uses, so that the loss of all is a mass removal.
const OTHERS: usize = 12;

pub struct ControlPlane {
    net: Net,
    istiod: Istiod,
    /// `None` while it is gone.
    serving: Option<Serving>,
    /// All resources, by name.
    mesh: Vec<(String, Address)>,
    is_changed: bool,
}

impl ControlPlane {
    /// Serves at host 2: the two services of the soak, the endpoints of the first one at hosts 11
    /// and 12, and an instance of the second one in network west.
    pub async fn start(net: Net) -> Self {
        let (remote, remote_service) = other_service("secret");
        let instance = changed("remote", bytes(net.ip(99)), |one| {
            (one.network, one.cluster_id) = ("west".into(), "west".into());
            one.services = [(remote.clone(), PortList { ports: ports() })].into();
        });
        let mut mesh = vec![
            (SERVICE.to_owned(), service()),
            (remote, remote_service),
            ("a".to_owned(), workload("a", bytes(net.ip(11)))),
            ("b".to_owned(), workload("b", bytes(net.ip(12)))),
            ("remote".to_owned(), instance),
        ];
        mesh.extend((0..OTHERS).map(|index| other_service(&format!("s{index}"))));
        let istiod = Istiod::default();
        let mut started = Self { net, istiod, serving: None, mesh, is_changed: false };
        started.put_all();
        started.serve().await;
        started
    }

    fn put_all(&self) {
        let all = self.mesh.iter().map(|(name, body)| (&**name, body.encode_to_vec()));
        self.istiod.put_all(ADDRESS, &all.collect::<Vec<_>>());
    }

    async fn serve(&mut self) {
        let address = self.net.address(2, 15012);
        self.serving = Some(self.istiod.serve(address, identities()).await);
    }

    async fn stop(&mut self) {
        self.serving.take().expect("a server").stop().await;
    }

    /// Changes the weight of an endpoint, or changes it back.
    pub fn change(&mut self) {
        self.is_changed = !self.is_changed;
        let capacity = 1 + u32::from(self.is_changed);
        let body = changed("a", bytes(self.net.ip(11)), |one| one.capacity = Some(capacity));
        self.istiod.put(ADDRESS, "a", &body);
    }

    /// Breaks the streams. They can be made again at once.
    pub fn cut(&self) {
        self.serving.as_ref().expect("a server").disconnect();
    }

    /// Is gone for a time.
    pub async fn leave_for(&mut self, time: Duration) {
        self.stop().await;
        // deadline: the length of a fault.
        sleep(time).await;
        self.serve().await;
    }

    /// Is gone for a time, and returns without its mesh for as long. The gateway holds the removal
    /// of everything until it is there again.
    pub async fn lose_mesh_for(&mut self, time: Duration, gateway: &Gateway) {
        self.stop().await;
        for (name, _) in &self.mesh {
            self.istiod.remove(ADDRESS, name);
        }
        // deadline: the length of a fault.
        sleep(time).await;
        self.serve().await;
        hold(gateway, self.mesh.len()).await;
        // deadline: the length of a fault.
        sleep(time).await;
        self.put_all();
        self.is_changed = false;
        hold(gateway, 0).await;
    }
}
