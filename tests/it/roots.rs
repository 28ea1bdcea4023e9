//! Rotation of the mesh's root by the control plane's authority: the new root joins the old one in
//! the bundle, then signs, and finally the old one leaves.

use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use strait::tls::{self, IdentityMaterial};
use strait::tools::dev::Authority;
use strait::tools::hbone::{Client, Tunnel};
use strait::xds::store::{ADDRESS, CLUSTER};

use crate::support::istiod::Istiod;
use crate::support::wds::{HOSTNAME, SERVICE, bytes, service, workload};
use crate::support::{
    CLIENT, ECHO, Endpoint, GATEWAY, Gateway, Identities, Net, broken, echoes, identities, pod,
    run, until,
};

/// Past and remaining life. Half of it is over a second from now, so that a new certificate is
/// requested soon.
const SHORT: (Duration, Duration) = (Duration::from_secs(9), Duration::from_secs(11));

/// TLS of a client with a certificate of `of`, which trusts all of `roots`.
fn client_of(of: &Identities, roots: &str) -> Arc<ClientConfig> {
    let leaf = of.leaf(CLIENT);
    let material = IdentityMaterial::from_pem(&leaf.chain_pem, &leaf.key_pem, roots);
    tls::client_config(&material.expect("material"), &[GATEWAY]).expect("a client")
}

async fn tunnel(gateway: &Gateway, tls: &Arc<ClientConfig>) -> Result<(Client, Tunnel), String> {
    let client = Client::connect(gateway.address, tls).await;
    let client = client.map_err(|error| error.to_string())?;
    let tunnel = client.tunnel(ECHO).await;
    let mut tunnel = tunnel.map_err(|error| error.to_string())?;
    echoes(&mut tunnel).await;
    Ok((client, tunnel))
}

#[test]
fn roots_rotate_by_a_bundle_of_two_and_end_no_tunnel_of_a_trusted_one() {
    run(async {
        let net = Net::new();
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        let (old, authority) = (identities(), Authority::new().expect("a root"));
        let new = Arc::new(Identities::from_authority(&authority));
        let both = old.root.clone() + &new.root;
        let istiod = Istiod::default();
        istiod.put(ADDRESS, SERVICE, &service());
        istiod.put(ADDRESS, "a", &workload("a", bytes(net.ip(11))));
        istiod.put(CLUSTER, &format!("inbound-vip|80|tcp|{HOSTNAME}"), &());
        istiod.ca.lives(SHORT.0, SHORT.1);
        let _serving = istiod.serve(net.address(2, 15012), old).await;
        let mut gateway = pod::spawn(net, "");
        gateway.ready().await;
        let (of_old, of_new) = (client_of(old, &both), client_of(&new, &both));
        let (_one, mut lost) = tunnel(&gateway, &of_old).await.expect("a tunnel");
        tunnel(&gateway, &of_new).await.expect_err("an unknown root");

        // The old root signs, and the new one is in the bundle.
        istiod.ca.rotate(None, &both);
        let opens = async || tunnel(&gateway, &of_new).await.ok();
        let kept = until("the new root", opens, Option::is_some).await;
        let (_other, mut kept) = kept.expect("a tunnel");
        echoes(&mut lost).await;

        // The new root signs, and the old one is in the bundle.
        istiod.ca.rotate(Some(Arc::clone(&new)), &both);
        let only_new = client_of(&new, &new.root);
        let opens = async || tunnel(&gateway, &only_new).await.is_ok();
        until("a certificate of the new root", opens, |&opens| opens).await;
        tunnel(&gateway, &of_old).await.expect("a tunnel");
        echoes(&mut lost).await;

        // The old root has left the bundle.
        istiod.ca.rotate(Some(Arc::clone(&new)), &new.root);
        assert_eq!(broken(&mut lost).await, Some(h2::Reason::INTERNAL_ERROR));
        tunnel(&gateway, &of_old).await.expect_err("a root that is gone");
        echoes(&mut kept).await;
    });
}
